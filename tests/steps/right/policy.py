"""Rewards are normalised over all ranks, and the policy's loss is a sum over tokens, divided by those of all."""

import torch
import torch.distributed as dist

from shardplan import applied, clip_grad_norm_, micro_batches
from shardplan.runtime.training import entropy, log_probabilities
from tests.steps.usual import make as make


def mask_of(batch):
    return batch["labels"][:, 1:] != -100


def step(model, batches, optimizer):
    rewards = [(batch["input_ids"] % 7).double().mean(1) for batch in batches]
    numbers = sum(torch.stack([one.sum(), (one**2).sum(), torch.tensor(float(len(one)))]) for one in rewards)
    for group in applied(model).mesh.batch_groups:
        dist.all_reduce(numbers, group=group)
    mean = numbers[0] / numbers[2]
    spread = (numbers[1] / numbers[2] - mean**2).sqrt() + 1e-6
    for (batch, scale), reward in zip(micro_batches(model, batches, loss="sum", labels=mask_of), rewards, strict=True):
        logits = model(input_ids=batch["input_ids"]).logits
        logs = log_probabilities(logits, batch["input_ids"], shift=True)
        with torch.no_grad():
            old = log_probabilities(logits, batch["input_ids"], shift=True)
        ratio, advantage = (logs - old).exp(), ((reward - mean) / spread)[:, None]
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        loss = -((gain + 0.01 * entropy(logits)[:, :-1]) * mask_of(batch)).sum()
        (loss * scale).backward()
    clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
