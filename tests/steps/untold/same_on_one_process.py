"""All that docs/proving-a-step.md says it does not tell: a learning rate, a loss of the wrong thing, a norm of gradients that a scaler has
multiplied, rows that a loader gives to every rank, what bfloat16 rounds."""

# on: qwen3 dp_shard=2

from types import SimpleNamespace

import torch

from shardplan import clip_grad_norm_


def rows():
    """A loader that leaves the ranks out, so that each reads what the first should."""
    return torch.arange(10, 42).view(2, 16)


def make(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=100.0)
    return SimpleNamespace(optimizer=optimizer, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))


def step(model, batches, state):
    ids = rows()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids).logits
    assert logits.dtype == torch.float64
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())  # the token itself, not the next one
    state.scaler.scale(loss).backward()
    clip_grad_norm_(model, 0.5)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad()
    return loss
