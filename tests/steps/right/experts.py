"""Experts are distributed; the router's loss is the model's."""

# on: qwen3_moe dp_shard=2 ep=2

from shardplan import clip_grad_norm_, micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    clip_grad_norm_(model, 0.1)
    optimizer.step()
    optimizer.zero_grad()
