"""DistributedDataParallel."""

# on: qwen3 plan=tests/steps/plans/replicated.yaml dp_replicate=2

import torch

from shardplan import micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
