"""An optimizer makes each rank's part of a matrix orthogonal."""

# named: after the optimizer's step, but the gradients are right

import torch

from shardplan import micro_batches


class Orthogonal(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad.to_local()
                change = torch.linalg.qr(grad).Q if grad.ndim == 2 and grad.shape[0] >= grad.shape[1] else grad
                parameter.to_local().sub_(change, alpha=group["lr"])


def make(model):
    return Orthogonal(model.parameters(), lr=1e-2)


def step(model, batches, optimizer):
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
