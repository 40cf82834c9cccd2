"""Each rank of tp draws the tokens that the loss of its last stage drops."""

# on: qwen3 pp=2 tp=2
# named: of the same tp group

import torch
import torch.nn.functional as F

from shardplan import clip_grad_norm_, micro_batches
from tests.steps.usual import make as make


def loss_fn(logits, labels):
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    return (losses * (torch.rand(losses.shape) < 0.5)).sum()


def step(pipeline, batches, optimizer):
    for batch, _ in micro_batches(pipeline, batches, labels=lambda batch: batch["labels"][:, 1:]):
        pipeline.step(**batch)
    clip_grad_norm_(pipeline, 0.1)
    optimizer.step()
    pipeline.zero_grad()
