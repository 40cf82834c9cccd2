"""A term of the parameters is added to the loss."""

# named: got mixed torch.Tensor and DTensor

import torch

from shardplan import micro_batches


def make(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        term = sum(p.pow(2).sum() for p in model.parameters())
        (model(**batch).loss * scale + 0.01 / len(batches) * term).backward()
    optimizer.step()
    optimizer.zero_grad()
