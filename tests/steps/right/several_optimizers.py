"""Embeddings and norms have an optimizer and a schedule of their own."""

import torch

from shardplan import micro_batches


def make(model):
    wide = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [torch.optim.AdamW(wide, lr=1e-2), torch.optim.SGD(others, lr=1e-1, momentum=0.9)]
    warm = torch.optim.lr_scheduler.LinearLR(optimizers[0], 0.1, total_iters=2)
    return optimizers, [warm, torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[1], 10)]


def step(model, batches, state):
    optimizers, schedules = state
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    for one in (*optimizers, *schedules):
        one.step()
    model.zero_grad()
