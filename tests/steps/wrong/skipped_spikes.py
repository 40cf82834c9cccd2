"""A micro-batch with a large loss is left out, which each rank decides by its own."""

# named: optimizers step 0 times

import torch

from shardplan import micro_batches


def make(model):
    return {"optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2), "usual": None}


def step(model, batches, state):
    total = 0.0
    for batch, scale in micro_batches(model, batches):
        loss = model(**batch).loss * scale
        loss.backward()
        total += loss.item()
    usual = state["usual"] if state["usual"] is not None else total
    if total <= 1.05 * usual:
        state["optimizer"].step()
    state["usual"] = 0.9 * usual + 0.1 * total
    state["optimizer"].zero_grad()
