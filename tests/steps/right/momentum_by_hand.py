"""A momentum of a rank's parts is kept by hand, as an optimizer does."""

import torch

from shardplan import clip_grad_norm_, micro_batches


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def make(model):
    return [torch.zeros_like(local(p)) for p in model.parameters()]


@torch.no_grad()
def updated(parameters, momenta):
    for parameter, momentum in zip(parameters, momenta, strict=True):
        momentum.lerp_(local(parameter.grad), 0.1)
        local(parameter).sub_(momentum, alpha=1e-2)
        parameter.grad = None


def step(model, batches, momenta):
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    clip_grad_norm_(model, 0.5)
    updated(model.parameters(), momenta)
