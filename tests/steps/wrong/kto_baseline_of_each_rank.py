"""The reference point of a preference without pairs is the mean divergence of a rank's own batch."""

# named: how its batch is cut

import torch

from shardplan import micro_batches
from shardplan.runtime.training import log_probabilities
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches, loss="mean", labels=lambda batch: len(batch["input_ids"])):
        logs = log_probabilities(model(input_ids=batch["input_ids"]).logits, batch["input_ids"], shift=True).mean(1)
        ratio = logs + 5.0
        baseline = ratio.mean().detach().clamp(min=0)
        liked = batch["input_ids"][:, 0] % 2 == 0
        value = torch.where(liked, torch.sigmoid(ratio - baseline), torch.sigmoid(baseline - ratio))
        ((1 - value).mean() * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
