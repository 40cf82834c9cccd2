"""Labels come from the neighbour."""

# named: off after backward

import torch
import torch.distributed as dist

from shardplan import micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        every = [torch.empty_like(batch["labels"]) for _ in range(dist.get_world_size())]
        dist.all_gather(every, batch["labels"])
        batch = {**batch, "labels": every[0]}
        (model(**batch).loss * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
