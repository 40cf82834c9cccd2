"""LARS: the rate of each weight is the ratio of the norms of its parts on a rank."""

# named: at the end of the step, but the gradients are right

import torch

from shardplan import micro_batches


def make(model):
    return None


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@torch.no_grad()
def update(model):
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        weight, gradient = local(parameter), local(parameter.grad)
        ratio = weight.norm() / (gradient.norm() + 1e-8)
        weight.sub_(0.01 * ratio * gradient)


def step(model, batches, state):
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    update(model)
    model.zero_grad()
