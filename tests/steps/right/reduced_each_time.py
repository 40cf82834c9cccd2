"""Gradients are reduced after each micro-batch."""

from shardplan import micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches, defer=False):
        (model(**batch).loss * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
