"""The norm is of the parameters that are not experts."""

# on: qwen3_moe dp_shard=2 ep=2
# named: leaves experts out

import torch.distributed as dist

from shardplan import clip_grad_norm_, micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    others = [p for p in model.parameters() if "ep" not in (p.device_mesh.mesh_dim_names or ())]
    norm = clip_grad_norm_(others, float("inf"))
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.05 / (float(norm) + 1e-6))
    assert dist.get_world_size() > 0
    optimizer.step()
    optimizer.zero_grad()
