"""Stages are clipped by norms of their own."""

# on: qwen3 pp=2 dp_shard=2
# named: ranks scale them by .*norms of their own parts

import torch
import torch.nn.functional as F

from shardplan import micro_batches
from tests.steps.usual import make as make


def loss_fn(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def step(pipeline, batches, optimizer):
    for batch, _ in micro_batches(pipeline, batches, labels=lambda batch: batch["labels"][:, 1:]):
        pipeline.step(**batch)
    torch.nn.utils.clip_grad_norm_(pipeline.parameters(), 0.1)
    optimizer.step()
    pipeline.zero_grad()
