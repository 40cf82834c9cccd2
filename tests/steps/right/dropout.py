"""Dropout on the logits, which all ranks of a tp group draw alike."""

import torch
import torch.nn.functional as F

from shardplan import applied, micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    torch.manual_seed(applied(model).mesh.batch_rank if hasattr(applied(model).mesh, "batch_rank") else 0)
    for batch, scale in micro_batches(model, batches, loss="sum", labels=lambda batch: batch["labels"][:, 1:]):
        logits = F.dropout(model(input_ids=batch["input_ids"]).logits[:, :-1], 0.1)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
        (loss * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
