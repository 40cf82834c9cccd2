"""A frozen embedding."""

import torch

from shardplan import clip_grad_norm_, micro_batches


def make(model):
    model.get_input_embeddings().requires_grad_(False)
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    clip_grad_norm_(model, 0.1)
    optimizer.step()
    optimizer.zero_grad()
