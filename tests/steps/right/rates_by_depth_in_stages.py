"""Learning rates that fall with the depth: a stage has groups of its own, and the depth is that of the name."""

# on: qwen3 pp=2

import re

import torch

from shardplan import clip_grad_norm_, micro_batches


def make(pipeline):
    groups = {}
    for name, parameter in pipeline.named_parameters():
        found = re.search(r"layers\.(\d+)\.", name)
        groups.setdefault(int(found.group(1)) if found else None, []).append(parameter)
    return torch.optim.AdamW(
        [{"params": own, "lr": 1e-2 if depth is None else 1e-3 * 2.0**depth} for depth, own in groups.items()]
    )


def step(pipeline, batches, optimizer):
    total = 0.0
    for batch, _ in micro_batches(pipeline, batches):
        total += pipeline.step(**batch)
    clip_grad_norm_(pipeline, 1.0)
    optimizer.step()
    pipeline.zero_grad()
    return total
