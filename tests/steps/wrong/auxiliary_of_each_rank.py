"""The router's loss is divided by the number of ranks, but it is already a mean over them."""

# on: qwen3_moe dp_shard=2 tp=2
# named: gradient

import torch.distributed as dist

from shardplan import micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        output = model(**batch, output_router_logits=True)
        ((output.loss + output.aux_loss / dist.get_world_size()) * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
