"""Sums over tokens, divided by the count of all data-parallel ranks, times these ranks."""

import torch.distributed as dist
import torch.nn.functional as F

from shardplan import applied
from tests.steps.usual import make as make


def step(model, batches, optimizer):
    count = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
    mesh = applied(model).mesh
    for group in mesh.batch_groups:
        dist.all_reduce(count, group=group)
    total = 0.0
    for batch in batches:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
        (losses * mesh.data_parallel_ranks / count).backward()
        total += losses.detach() / count
    for group in mesh.batch_groups:
        dist.all_reduce(total, group=group)
    optimizer.step()
    optimizer.zero_grad()
    return total
