"""float16 with a scaler: gradients are divided by its factor in front of the norm."""

from types import SimpleNamespace

import torch

from shardplan import clip_grad_norm_, micro_batches


def make(model):
    return SimpleNamespace(
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), scaler=torch.amp.GradScaler("cpu", init_scale=1024.0)
    )


def step(model, batches, state):
    for batch, scale in micro_batches(model, batches):
        with torch.autocast("cpu", torch.float16):
            loss = model(**batch).loss * scale
        state.scaler.scale(loss).backward()
    state.scaler.unscale_(state.optimizer)
    clip_grad_norm_(model.parameters(), 0.5)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad()
