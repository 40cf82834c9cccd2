"""Adapters alone are trained."""

# on: tests.case_models:llama_with_lora dp_shard=2 tp=2

import torch

from shardplan import clip_grad_norm_, micro_batches


def make(model):
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    clip_grad_norm_(model, 0.1)
    optimizer.step()
    optimizer.zero_grad()
