"""Each rank adds noise of its own to its gradients."""

# named: off rank 0|gradient

import torch

from shardplan import micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    for parameter in model.parameters():
        grad = parameter.grad.to_local()
        grad += 1e-3 * torch.randn(grad.shape)
    optimizer.step()
    optimizer.zero_grad()
