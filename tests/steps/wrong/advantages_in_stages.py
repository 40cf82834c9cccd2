"""The loss of a pipeline normalises advantages over the rows that it is given."""

# on: qwen3 pp=2 dp_shard=2
# named: how its batch is cut

import torch.nn.functional as F

from shardplan import clip_grad_norm_, micro_batches
from tests.steps.usual import make as make


def loss_fn(logits, labels):
    logs = -F.cross_entropy(logits[:, :-1].flatten(0, 1), labels["ids"][:, 1:].flatten(), reduction="none")
    reward = labels["reward"]
    advantage = (reward - reward.mean()) / (reward.std(correction=0) + 1e-4)
    return -(logs.view(len(reward), -1) * labels["counts"] * advantage[:, None]).sum()


def step(pipeline, batches, optimizer):
    given = [
        {
            "input_ids": batch["input_ids"],
            "labels": {
                "ids": batch["input_ids"],
                "reward": (batch["input_ids"] % 7).double().mean(1),
                "counts": batch["labels"][:, 1:] != -100,
            },
        }
        for batch in batches
    ]
    for batch, _ in micro_batches(pipeline, given, labels=lambda one: one["labels"]["counts"]):
        pipeline.step(**batch)
    clip_grad_norm_(pipeline, 0.1)
    optimizer.step()
    pipeline.zero_grad()
