"""Each gradient is clipped by the norm of the part of it that a rank has."""

# named: right after backward, and

from shardplan import micro_batches
from tests.steps.usual import make as make


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            part = local(parameter.grad)
            part.mul_((0.01 / (part.norm() + 1e-6)).clamp(max=1.0))
    optimizer.step()
    optimizer.zero_grad()
