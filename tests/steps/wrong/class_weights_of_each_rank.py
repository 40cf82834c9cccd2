"""Weights of tokens that balance classes are counted in a rank's micro-batches."""

# named: one process has no such sum

import torch

from shardplan import micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    counts = sum(b["input_ids"].flatten().bincount(minlength=4096) for b in batches).double()
    weights = (counts.sum() / (counts + 1)).log()
    for batch, scale in micro_batches(model, batches, loss="sum", labels=lambda b: b["labels"][:, 1:]):
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
        labels = batch["labels"][:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        ((loss * weights[labels.clamp(min=0)]).sum() * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
