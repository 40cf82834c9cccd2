"""The pipeline's own loss is a mean over the tokens of a micro-batch, where the step divides a sum."""

# on: qwen3 pp=2 dp_shard=2
# named: how its batch is cut

import torch.nn.functional as F

from shardplan import clip_grad_norm_, micro_batches
from tests.steps.usual import make as make


def loss_fn(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def step(pipeline, batches, optimizer):
    for batch, _ in micro_batches(pipeline, batches, labels=lambda batch: batch["labels"][:, 1:]):
        pipeline.step(**batch)
    clip_grad_norm_(pipeline, 0.1)
    optimizer.step()
    pipeline.zero_grad()
