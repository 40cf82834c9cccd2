"""Stages of a pipeline."""

# on: qwen3 pp=2 dp_shard=2

from shardplan import clip_grad_norm_, micro_batches
from tests.steps.usual import make as make


def step(pipeline, batches, optimizer):
    total = 0.0
    for batch, _ in micro_batches(pipeline, batches):
        total += pipeline.step(**batch)
    clip_grad_norm_(pipeline, 0.1)
    optimizer.step()
    pipeline.zero_grad()
    return total
