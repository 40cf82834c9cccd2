"""The optimizer calls the loss itself."""

import torch

from shardplan import micro_batches


def make(model):
    return torch.optim.SGD(model.parameters(), lr=1e-1, nesterov=True, momentum=0.9)


def step(model, batches, optimizer):
    def loss_and_gradients():
        optimizer.zero_grad()
        for batch, scale in micro_batches(model, batches):
            (model(**batch).loss * scale).backward()

    optimizer.step(loss_and_gradients)
