"""Each rank draws the tokens that it drops."""

# named: of the same tp group

import torch

from shardplan import micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        weight = torch.rand(batch["input_ids"].shape) < 0.5
        logits = model(input_ids=batch["input_ids"], labels=batch["labels"])
        picked = (logits.logits.logsumexp(-1) * weight).sum() / weight.numel()
        ((logits.loss + picked) * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
