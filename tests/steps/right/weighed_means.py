"""A mean over each micro-batch's tokens, with smoothed labels and the square of the normaliser."""

import torch
import torch.nn.functional as F

from shardplan import micro_batches
from tests.steps.usual import make as make


def counted(batch):
    return torch.ones_like(batch["input_ids"][:, 1:], dtype=torch.bool)


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches, loss="mean", labels=counted):
        logits, target = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:]
        loss = F.cross_entropy(logits, target.flatten(), label_smoothing=0.1)
        ((loss + 1e-3 * logits.logsumexp(-1).square().mean()) * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
