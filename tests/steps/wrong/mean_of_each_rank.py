"""Divided by the tokens of the rank's own micro-batches."""

# named: the mean of what each data-parallel rank has

import torch

from tests.steps.usual import make as make


def step(model, batches, optimizer):
    tokens = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches).clamp(min=1)
    for batch in batches:
        logits = model(**batch).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum")
        (loss / tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
