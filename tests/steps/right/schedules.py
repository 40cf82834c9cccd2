"""A warm-up and a decay, once a step."""

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from shardplan import micro_batches


def make(model):
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return optimizer, SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=1), CosineAnnealingLR(optimizer, 4)], [1]
    )


def step(model, batches, state):
    optimizer, schedule = state
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
