"""The squares of all ranks are added, also of what they have whole."""

# named: counts what ranks have whole

import torch
import torch.distributed as dist

from shardplan import micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    grads = [parameter.grad.to_local() for parameter in model.parameters()]
    square = torch.stack([grad.norm() ** 2 for grad in grads]).sum()
    dist.all_reduce(square)
    for grad in grads:
        grad.mul_((0.05 / (square.sqrt() + 1e-6)).clamp(max=1))
    optimizer.step()
    optimizer.zero_grad()
