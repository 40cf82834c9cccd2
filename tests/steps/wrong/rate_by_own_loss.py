"""The rate follows the loss of the rank."""

# named: the learning rate is

import torch

from shardplan import clip_grad_norm_, micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    total = torch.zeros(())
    for batch, scale in micro_batches(model, batches):
        loss = model(**batch).loss * scale
        loss.backward()
        total += loss.detach()
    clip_grad_norm_(model, 1.0)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * float(total)
    optimizer.step()
    optimizer.zero_grad()
