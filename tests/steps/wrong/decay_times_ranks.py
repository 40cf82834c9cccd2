"""Weights decay by hand, by the learning rate times the ranks."""

# named: off before the optimizer's step: all are

import torch
import torch.distributed as dist

from shardplan import micro_batches


def make(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2)


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 - 0.01 * dist.get_world_size())
    optimizer.step()
    optimizer.zero_grad()
