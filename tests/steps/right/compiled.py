"""The loss and the optimizer are compiled."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from shardplan import clip_grad_norm_, micro_batches


def labels(batch):
    return batch["labels"][:, 1:]


def cross_entropy(logits, targets):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum")


def make(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return SimpleNamespace(
        optimizer=optimizer,
        loss=torch.compile(cross_entropy, backend="aot_eager"),
        update=torch.compile(optimizer.step, backend="eager"),
    )


def step(model, batches, state):
    for batch, scale in micro_batches(model, batches, loss="sum", labels=labels):
        logits = model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits
        (state.loss(logits, labels(batch)) * scale).backward()
    clip_grad_norm_(model, 0.1)
    state.update()
    state.optimizer.zero_grad()
