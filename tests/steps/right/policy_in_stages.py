"""A policy gradient in a pipeline: the loss reads advantages that are normalised over all ranks."""

# on: qwen3 pp=2 dp_shard=2

import torch
import torch.distributed as dist

from shardplan import applied, clip_grad_norm_, micro_batches
from shardplan.runtime.training import log_probabilities
from tests.steps.usual import make as make


def loss_fn(logits, labels):
    ratio = (log_probabilities(logits, labels["ids"], shift=True) - labels["old"]).exp()
    gain = labels["advantages"][:, None]
    return -(torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain) * labels["completion"]).sum()


def step(pipeline, batches, optimizer):
    rewards = [(batch["input_ids"] % 7).double().mean(1) for batch in batches]
    numbers = sum(torch.stack([one.sum(), (one**2).sum(), torch.tensor(float(len(one)))]) for one in rewards)
    for group in applied(pipeline).mesh.batch_groups:
        dist.all_reduce(numbers, group=group)
    mean = numbers[0] / numbers[2]
    spread = (numbers[1] / numbers[2] - mean**2).sqrt() + 1e-6
    experience = [
        {
            "input_ids": batch["input_ids"],
            "labels": {
                "ids": batch["input_ids"],
                "old": torch.full_like(batch["input_ids"][:, 1:], -5.0, dtype=torch.float64),
                "advantages": (reward - mean) / spread,
                "completion": (batch["labels"][:, 1:] != -100).double(),
            },
        }
        for batch, reward in zip(batches, rewards, strict=True)
    ]
    total = 0.0
    for batch, _ in micro_batches(pipeline, experience, labels=lambda one: one["labels"]["completion"].bool()):
        total += pipeline.step(**batch)
    clip_grad_norm_(pipeline, 0.1)
    optimizer.step()
    pipeline.zero_grad()
    return total
