"""The forward runs in bfloat16."""

import torch

from shardplan import clip_grad_norm_, micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        (loss * scale).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
