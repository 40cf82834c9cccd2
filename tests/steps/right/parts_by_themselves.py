"""The head is called by itself: data-parallel ranks gather it for this call."""

import torch.nn.functional as F

from shardplan import micro_batches
from tests.steps.usual import make as make


def labels(batch):
    return batch["labels"][:, 1:]


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches, loss="sum", labels=labels):
        hidden = model.model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask"))[0]
        logits = model.lm_head(hidden[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), labels(batch).flatten(), reduction="sum")
        (loss * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
