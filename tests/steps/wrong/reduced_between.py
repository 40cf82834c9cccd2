"""Gradients are averaged by hand after each micro-batch."""

# named: do not reduce them|off after backward

import torch.distributed as dist

from shardplan import micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches, defer=False):
        (model(**batch).loss * scale).backward()
        for parameter in model.parameters():
            grad = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()
