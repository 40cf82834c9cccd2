"""The reduction of gradients is put off in the last micro-batch too."""

# named: gradient

import torch

from shardplan import micro_batches


def make(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        model.set_requires_gradient_sync(False)
        (model(**batch).loss * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.set_requires_gradient_sync(True)
