"""Sequences are split by the plan: the step is the one without cp."""

# on: qwen3 plan=tests/steps/plans/long.yaml dp_shard=2 cp=2

import torch
import torch.distributed as dist

from shardplan import clip_grad_norm_, micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    total = torch.zeros(())
    for batch, scale in micro_batches(model, batches):
        loss = model(**batch).loss * scale
        loss.backward()
        total += loss.detach()
    clip_grad_norm_(model, 0.1)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return total / dist.get_world_size()
