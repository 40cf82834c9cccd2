"""Gradients are reduced after each micro-batch."""

import torch

from shardplan import micro_batches


def make(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches, defer=False):
        (model(**batch).loss * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
