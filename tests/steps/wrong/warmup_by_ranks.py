"""The steps of the warm-up are divided by the number of processes."""

# named: the learning rate is

import torch
import torch.distributed as dist

from shardplan import clip_grad_norm_, micro_batches

STEPS = 16


def make(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = STEPS // dist.get_world_size()
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=steps)


def step(model, batches, state):
    optimizer, schedule = state
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
