"""The distance to a teacher is the mean over this micro-batch's tokens."""

# named: depends on how its batch is cut into

import torch
import torch.distributed as dist
import torch.nn.functional as F


def make(model):
    return torch.optim.SGD(model.parameters(), lr=1e-1)


def step(model, batches, optimizer):
    total = 0.0
    for batch in batches:
        logits = model(input_ids=batch["input_ids"]).logits
        teacher = torch.cos(torch.arange(logits.shape[-1]) + batch["input_ids"][..., None]).to(logits.dtype)
        distance = F.kl_div(logits.log_softmax(-1), teacher.softmax(-1), reduction="none").sum(-1)
        mask = batch["labels"] != -100
        loss = (distance * mask).sum() / mask.sum().clamp(min=1) / len(batches)
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    total = torch.tensor(total)
    dist.all_reduce(total)
    return total / dist.get_world_size()
