"""An average of the parameters keeps each rank's part of them."""

# named: a rank's part

import torch

from shardplan import micro_batches


def local(parameter):
    return parameter.detach().to_local() if hasattr(parameter, "to_local") else parameter.detach()


def make(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, {name: local(parameter).clone() for name, parameter in model.named_parameters()}


def step(model, batches, state):
    optimizer, average = state
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            average[name].lerp_(local(parameter), 0.1)
