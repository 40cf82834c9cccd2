"""The distance to a frozen teacher is a sum over tokens."""

import torch
import torch.nn.functional as F

from shardplan import micro_batches


def make(model):
    return torch.optim.SGD(model.parameters(), lr=1e-1)


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches, loss="sum", labels=lambda batch: batch["labels"] != -100):
        logits = model(input_ids=batch["input_ids"]).logits
        teacher = torch.cos(torch.arange(logits.shape[-1]) + batch["input_ids"][..., None]).to(logits.dtype)
        distance = F.kl_div(logits.log_softmax(-1), teacher.softmax(-1), reduction="none").sum(-1)
        ((distance * (batch["labels"] != -100)).sum() * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
