"""A running baseline of the reward, kept in an object, follows a rank's own batches."""

# named: after step 1 state.*value differed on ranks

import torch

from shardplan import micro_batches


class Baseline:
    def __init__(self):
        self.value = torch.zeros(2)

    def update(self, reward):
        self.value = 0.9 * self.value + 0.1 * torch.stack((reward.mean(), reward.square().mean()))


def make(model):
    return {"optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2), "more": {"of": [Baseline()]}}


def step(model, batches, state):
    baseline = state["more"]["of"][0]
    seen = []
    for batch, scale in micro_batches(model, batches, loss="sum", labels=lambda b: b["labels"][:, 1:]):
        reward = (batch["input_ids"] % 5).double().mean(-1)
        seen.append(reward)
        logits = model(input_ids=batch["input_ids"]).logits
        taken = logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
        mask = batch["labels"][:, 1:] != -100
        loss = -((reward - baseline.value[0])[:, None] * taken * mask).sum()
        (loss * scale).backward()
    baseline.update(torch.cat(seen))
    state["optimizer"].step()
    state["optimizer"].zero_grad()
