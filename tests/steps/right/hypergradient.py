"""The learning rate follows the product of two gradients (hypergradient descent), summed over ranks."""

import torch

from shardplan import micro_batches


def make(model):
    return {"optimizer": torch.optim.SGD(model.parameters(), lr=1e-2), "before": None, "product": torch.zeros(())}


def step(model, batches, state):
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    now = [p.grad.to_local().clone() if hasattr(p.grad, "to_local") else p.grad.clone() for p in model.parameters()]
    whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    if state["before"] is not None:
        state["product"] += sum((a * b).sum() for a, b in zip(whole, state["wholes"], strict=True))
        for group in state["optimizer"].param_groups:
            group["lr"] = 1e-2 * (1 + float(state["product"].tanh()))
    state["before"], state["wholes"] = now, whole
    state["optimizer"].step()
    state["optimizer"].zero_grad()
