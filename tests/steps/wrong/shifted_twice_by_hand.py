"""A loss shifts logits and labels that were shifted before."""

# named: shifted twice

import torch

from shardplan import micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches, loss="sum", labels=lambda batch: batch["labels"][:, 1:]):
        logits, labels = model(batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        (loss * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
