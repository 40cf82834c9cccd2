"""Gradients are zeroed in the loop."""

# named: zeroed before the next

import torch

from shardplan import micro_batches


def make(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches, defer=False):
        optimizer.zero_grad()
        (model(**batch).loss * scale).backward()
    optimizer.step()
