"""The loss of an evaluation is a sum over all ranks, divided by the count of all."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardplan import applied, micro_batches
from tests.steps.usual import make as make


@torch.no_grad()
def evaluate(model, batches):
    model.eval()
    numbers = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        logits, labels = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
        numbers[0] += F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        numbers[1] += (labels != -100).sum()
    for group in applied(model).mesh.batch_groups:
        dist.all_reduce(numbers, group=group)
    model.train()
    return numbers[0] / numbers[1]


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
    return evaluate(model, batches)
