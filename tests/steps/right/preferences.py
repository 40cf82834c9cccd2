"""Pairs of answers: the loss is a mean over pairs."""

import torch.nn.functional as F

from shardplan import micro_batches
from shardplan.runtime.training import log_probabilities
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches, loss="mean", labels=lambda batch: len(batch["input_ids"]) // 2):
        logs = log_probabilities(model(input_ids=batch["input_ids"]).logits, batch["input_ids"], shift=True).sum(1)
        chosen, rejected = logs[0::2], logs[1::2]
        (-F.logsigmoid(0.1 * (chosen - rejected)).mean() * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
