"""Two optimizers take turns, each with a chain of schedules, and a third one has no gradient at first."""

from types import SimpleNamespace

import torch
from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, LinearLR, OneCycleLR, SequentialLR

from shardplan import clip_grad_norm_, micro_batches


def make(model):
    norms = [p for n, p in model.named_parameters() if "norm" in n]
    rest = [p for n, p in model.named_parameters() if "norm" not in n]
    wide, tall = rest[::2], rest[1::2]
    optimizers = [
        torch.optim.AdamW([{"params": wide}, {"params": norms, "weight_decay": 0.0}], lr=1e-2),
        torch.optim.RMSprop(tall, lr=1e-3, centered=True, momentum=0.5),
    ]
    schedules = [
        SequentialLR(
            optimizers[0],
            [
                ConstantLR(optimizers[0], 0.5, total_iters=1),
                LinearLR(optimizers[0], 0.1),
                ExponentialLR(optimizers[0], 0.9),
            ],
            milestones=[1, 2],
        ),
        OneCycleLR(optimizers[1], max_lr=1e-2, total_steps=10),
    ]
    return SimpleNamespace(optimizers=optimizers, schedules=schedules, count=0)


def step(model, batches, state):
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    turn = state.count % 2
    state.count += 1
    clip_grad_norm_(model, 0.2)
    state.optimizers[turn].step()
    state.schedules[turn].step()
    model.zero_grad(set_to_none=False)
