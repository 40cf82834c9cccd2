"""A second loss is weighed by a rank's own accuracy."""

# named: after step 1 state\[1\]\['weight'\] differed on ranks

import torch

from shardplan import micro_batches


def make(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2), {"weight": 1.0}


def step(model, batches, state):
    optimizer, kept = state
    right = total = 0
    for batch, scale in micro_batches(model, batches):
        output = model(**batch)
        (kept["weight"] * output.loss * scale).backward()
        hits = output.logits[:, :-1].argmax(-1) == batch["input_ids"][:, 1:]
        right, total = right + hits.sum().item(), total + hits.numel() + batch["input_ids"][0, 0].item() % 7
    kept["weight"] = 1 + total / 1000
    optimizer.step()
    optimizer.zero_grad()
