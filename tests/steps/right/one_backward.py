"""The losses of all micro-batches are added up, with one backward."""

# on: qwen3 tp=2

import torch

from shardplan import micro_batches


def make(model):
    return torch.optim.Adagrad(model.parameters(), lr=1e-2)


def step(model, batches, optimizer):
    loss = sum(model(**batch).loss * scale for batch, scale in micro_batches(model, batches))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
