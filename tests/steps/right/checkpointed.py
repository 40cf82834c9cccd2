"""Activations are recomputed in backward."""

# on: qwen3 plan=tests/steps/plans/checkpointed.yaml dp_shard=2 tp=2 sequence_parallel

from shardplan import clip_grad_norm_, micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    clip_grad_norm_(model, 0.1)
    optimizer.step()
    optimizer.zero_grad()
