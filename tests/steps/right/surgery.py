"""Gradient surgery: each of two losses has a backward of its own, and what contradicts is taken out of one by whole inner products."""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from shardplan import micro_batches


def make(model):
    return torch.optim.SGD(model.parameters(), lr=1e-1)


def labels(batch):
    return batch["labels"][:, 1:]


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def gradient_of(model, batches, loss_of):
    for batch, scale in micro_batches(model, batches, loss="sum", labels=labels):
        logits = model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits[:, :-1]
        (loss_of(logits, labels(batch)) * scale).backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


def step(model, batches, optimizer):
    def likelihood(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

    def spread(logits, targets):
        return (logits.logsumexp(-1) ** 2 * (targets != -100)).sum()

    first, second = (gradient_of(model, batches, loss_of) for loss_of in (likelihood, spread))
    product = sum(whole((first[name] * second[name]).sum()) for name in first)
    square = sum(whole((first[name] ** 2).sum()) for name in first)
    factor = min(0.0, float(product / square))
    for name, parameter in model.named_parameters():
        if name in first:
            parameter.grad = first[name] + second[name] - factor * first[name]
    optimizer.step()
    optimizer.zero_grad()
