"""A micro-batch without labels is left out: the other data-parallel ranks wait for its forward, or reduce another one's."""

# named: no answer in time

import torch.nn.functional as F

from shardplan import micro_batches
from tests.steps.usual import make as make


def labels(batch):
    return batch["labels"][:, 1:]


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches, loss="sum", labels=labels):
        if not (labels(batch) != -100).any():
            continue
        logits = model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels(batch).flatten(), reduction="sum")
        (loss * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
