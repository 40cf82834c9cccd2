"""The loss that is printed is the mean of the micro-batches' means."""

# named: the loss that the step returns depends on how

import torch
import torch.distributed as dist

from shardplan import micro_batches
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    losses = []
    for batch, scale in micro_batches(model, batches):
        output = model(**batch)
        (output.loss * scale).backward()
        count = (batch["labels"][:, 1:] != -100).sum().clamp(min=1)
        logits = output.logits[:, :-1].flatten(0, 1).detach()
        losses.append(
            torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum") / count
        )
    optimizer.step()
    optimizer.zero_grad()
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()
