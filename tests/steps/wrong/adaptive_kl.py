"""The weight of the divergence follows each rank's own divergence."""

# named: step 2, rank 0: the gradient of

import torch

from shardplan import micro_batches
from shardplan.runtime.training import log_probabilities


def make(model):
    return {"optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2), "weight": 0.1, "old": {}}


def labels(batch):
    return batch["labels"][:, 1:] != -100


def step(model, batches, state):
    far = []
    for batch, scale in micro_batches(model, batches, loss="sum", labels=labels):
        logs = log_probabilities(model(input_ids=batch["input_ids"]).logits, batch["input_ids"], shift=True)
        mask = labels(batch)
        kl = ((logs + 4.0) ** 2 * mask).sum()
        ((-(logs * mask).sum() + state["weight"] * kl) * scale).backward()
        far.append(kl.item() / max(int(mask.sum()), 1))
    state["weight"] *= 1.5 if sum(far) / len(far) > 0.2 else 0.5
    state["weight"] *= 1 + 0.1 * sum(far)
    state["optimizer"].step()
    state["optimizer"].zero_grad()
