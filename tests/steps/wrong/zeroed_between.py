"""Gradients are zeroed in the loop."""

# named: zeroed before the next

from shardplan import micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches, defer=False):
        optimizer.zero_grad()
        (model(**batch).loss * scale).backward()
    optimizer.step()
