"""Masked tokens of an encoder, whose labels are not shifted."""

# on: bert dp_shard=2 tp=2

import torch.nn.functional as F

from shardplan import micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches, loss="sum"):
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        (loss * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
