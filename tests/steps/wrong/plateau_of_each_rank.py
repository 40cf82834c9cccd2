"""A schedule follows the loss of a rank."""

# named: state\[1\].best is

import torch
import torch.distributed as dist

from shardplan import micro_batches


def make(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)


def step(model, batches, state):
    optimizer, schedule = state
    total = 0.0
    for batch, scale in micro_batches(model, batches):
        loss = model(**batch).loss * scale
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step(total * (1 + dist.get_rank()) / dist.get_world_size())
