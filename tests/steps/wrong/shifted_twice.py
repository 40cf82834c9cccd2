"""Labels are shifted for a model that shifts them."""

# named: shifted twice

import torch

from shardplan import micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
        (model(**{**batch, "labels": labels}).loss * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
