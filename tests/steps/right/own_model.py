"""A model of one's own, and a loss of one's own."""

# on: tests.case_models:blocks plan=tests/steps/plans/blocks.yaml inputs=tests.case_models:features dp_shard=2 tp=2

import torch.nn.functional as F

from shardplan import clip_grad_norm_, micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches, loss="mean", labels=lambda batch: len(batch["x"])):
        (F.mse_loss(model(**batch), batch["x"].flip(-1)) * scale).backward()
    clip_grad_norm_(model, 0.1)
    optimizer.step()
    optimizer.zero_grad()
