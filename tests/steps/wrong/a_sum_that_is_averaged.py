"""FSDP2 averages the sums, which are divided by the count of all ranks."""

# named: are 0.25 times

import torch
import torch.distributed as dist

from tests.steps.usual import make as make


def step(model, batches, optimizer):
    tokens = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
    dist.all_reduce(tokens)
    for batch in batches:
        logits = model(**batch).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum")
        (loss / tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
