"""Gradients are centred (their mean over columns taken off), each rank the columns that it has."""

# named: right after backward, and .* off at the optimizer's step \(16 of 25

from shardplan import micro_batches
from tests.steps.usual import make as make


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            part = local(parameter.grad)
            part -= part.mean(0, keepdim=True)
    optimizer.step()
    optimizer.zero_grad()
