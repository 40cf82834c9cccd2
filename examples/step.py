"""The training step of README, with a schedule and an average of the parameters, for `shardplan verify --step`."""

from types import SimpleNamespace

import torch
import torch.distributed as dist

from shardplan import clip_grad_norm_, micro_batches


def make(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return SimpleNamespace(optimizer=optimizer, schedule=schedule, average=average)


def step(model, batches, state):
    total = torch.zeros(())
    for batch, scale in micro_batches(model, batches):
        loss = model(**batch).loss * scale
        loss.backward()
        total += loss.detach()
    clip_grad_norm_(model, 1.0)
    state.optimizer.step()
    state.schedule.step()
    state.optimizer.zero_grad()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            state.average[name].lerp_(parameter, 0.01)
    dist.all_reduce(total)
    return total / dist.get_world_size()
