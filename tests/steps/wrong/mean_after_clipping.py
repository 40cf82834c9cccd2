"""Sums are clipped, and then divided."""

# named: gradient

from shardplan import clip_grad_norm_
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    tokens = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
    for batch in batches:
        (model(**batch, num_items_in_batch=1).loss).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    for parameter in model.parameters():
        parameter.grad /= tokens
    optimizer.step()
    optimizer.zero_grad()
