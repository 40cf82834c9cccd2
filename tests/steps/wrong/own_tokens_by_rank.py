"""Scheduled sampling: tokens are replaced by drawn ones, with a generator that is seeded by the rank."""

# on: qwen3 tp=2
# named: need the same batch

import torch
import torch.distributed as dist

from shardplan import micro_batches


def make(model):
    generator = torch.Generator().manual_seed(1234 + dist.get_rank())
    return torch.optim.AdamW(model.parameters(), lr=1e-2), generator


def step(model, batches, state):
    optimizer, generator = state
    for batch, scale in micro_batches(model, batches):
        drawn = torch.rand(batch["input_ids"].shape, generator=generator) < 0.2
        ids = torch.where(drawn, batch["input_ids"].roll(1, 1), batch["input_ids"])
        (model(**{**batch, "input_ids": ids}).loss * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
