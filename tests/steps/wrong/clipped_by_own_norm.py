"""Each rank clips by the norm of its shards."""

# named: ranks scale them by .*norms of their own parts

import torch

from shardplan import micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    grads = [parameter.grad.to_local() for parameter in model.parameters()]
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    for grad in grads:
        grad.mul_((0.05 / (norm + 1e-6)).clamp(max=1))
    optimizer.step()
    optimizer.zero_grad()
