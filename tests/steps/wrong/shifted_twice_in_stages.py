"""Labels of a pipeline's own loss are shifted before the step, and in the loss once more."""

# on: qwen3 pp=2 dp_shard=2
# named: shifted twice

import torch.nn.functional as F

from shardplan import clip_grad_norm_, micro_batches
from tests.steps.usual import make as make


def loss_fn(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def step(pipeline, batches, optimizer):
    given = [{**batch, "labels": F.pad(batch["labels"][:, 1:], (0, 1), value=-100)} for batch in batches]
    for batch, _ in micro_batches(pipeline, given, labels=lambda batch: batch["labels"][:, 1:]):
        pipeline.step(**batch)
    clip_grad_norm_(pipeline, 0.1)
    optimizer.step()
    pipeline.zero_grad()
