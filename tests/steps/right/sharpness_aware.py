"""Sharpness-aware minimisation: the second gradient is taken where the first one leads, by the norm of the whole gradient."""

import torch

from shardplan import micro_batches
from shardplan.runtime.training import get_grad_norm


def make(model):
    return torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9)


def gradients(model, batches):
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()


@torch.no_grad()
def move(model, factor):
    moved = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            moved[name] = parameter.grad * factor
            parameter.add_(moved[name])
    return moved


def step(model, batches, optimizer):
    gradients(model, batches)
    moved = move(model, 0.05 / (float(get_grad_norm(model)) + 1e-12))
    optimizer.zero_grad()
    gradients(model, batches)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in moved:
                parameter.sub_(moved[name])
    optimizer.step()
    optimizer.zero_grad()
