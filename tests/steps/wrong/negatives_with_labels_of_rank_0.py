"""Rows are told apart from those of all ranks, and the place of a row among them is taken for that of rank 0."""

# on: qwen3 dp_shard=2
# named: how its batch is cut

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.nn.functional import all_gather

from shardplan import micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches, loss="mean", labels=lambda batch: len(batch["input_ids"])):
        rows = model(input_ids=batch["input_ids"]).logits.mean(1)
        others = model(input_ids=batch["input_ids"].flip(1)).logits.mean(1)
        every = torch.cat(all_gather(others)) if dist.get_world_size() > 1 else others
        (F.cross_entropy(rows @ every.T, torch.arange(len(rows))) * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
