"""Advantages are normalised over a micro-batch."""

# named: how its batch is cut

from shardplan import micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches, loss="sum", labels=lambda batch: batch["labels"][:, 1:]):
        logs = model(batch["input_ids"]).logits[:, :-1].log_softmax(-1)
        logs = logs.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
        mask = batch["labels"][:, 1:] != -100
        reward = mask.double().mean(-1)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
        (-(logs * mask * advantage[:, None]).sum() * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
