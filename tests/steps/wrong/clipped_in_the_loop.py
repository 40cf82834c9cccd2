"""Gradients are clipped after each micro-batch."""

# named: gradient

from shardplan import clip_grad_norm_, micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches, defer=False):
        (model(**batch).loss * scale).backward()
        clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()
