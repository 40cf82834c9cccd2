"""Gradients are divided by the ranks once more."""

# named: they are scaled by 0.25

import torch
import torch.distributed as dist

from shardplan import micro_batches


def make(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()
