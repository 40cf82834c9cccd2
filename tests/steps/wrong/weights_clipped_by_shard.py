"""After the step each matrix is held to a norm, which is that of a rank's part."""

# named: off at the end of the step, but the gradients are right, and right after the optimizer's

import torch

from shardplan import micro_batches
from tests.steps.usual import make as make


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                part = local(parameter)
                part.mul_((0.5 / part.norm()).clamp(max=1.0))
