"""accelerate's loop, with a schedule that is not prepared: a prepared one steps once for each data-parallel rank."""

import torch
from accelerate import Accelerator

from shardplan import micro_batches
from shardplan.compat import adopt


def make(model):
    accelerator = Accelerator(cpu=True)
    adopt(accelerator, model)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 1 / (1 + step))
    return accelerator, optimizer, schedule


def step(model, batches, state):
    accelerator, optimizer, schedule = state
    for batch, scale in micro_batches(model, batches):
        accelerator.backward(model(**batch).loss * scale)
    accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
