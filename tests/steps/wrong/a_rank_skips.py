"""A rank that finds its gradients too large skips the step."""

# named: optimizers step 0 times

import torch
import torch.distributed as dist

from shardplan import micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    norm = torch.stack([parameter.grad.to_local().norm() for parameter in model.parameters()]).norm()
    if dist.get_rank() == 0 or not norm.isfinite():
        optimizer.step()
    optimizer.zero_grad()
