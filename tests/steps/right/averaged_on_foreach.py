"""Two averages of the parameters, one for all at once, the other with a factor that grows; a regulariser pulls to one of them."""

from types import SimpleNamespace

import torch

from shardplan import clip_grad_norm_, micro_batches


def make(model):
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    return SimpleNamespace(
        optimizer=torch.optim.NAdam(model.parameters(), lr=1e-2),
        slow=kept,
        fast={name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        steps=0,
    )


def step(model, batches, state):
    for batch, scale in micro_batches(model, batches):
        (model(**batch).loss * scale).backward()
    with torch.no_grad():
        for parameter, anchor in zip(model.parameters(), state.slow, strict=True):
            if parameter.grad is not None:
                parameter.grad.add_(parameter - anchor, alpha=1e-3)
    clip_grad_norm_(model, 0.5)
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.steps += 1
    decay = min(0.99, (1 + state.steps) / (10 + state.steps))
    with torch.no_grad():
        torch._foreach_lerp_(state.slow, list(model.parameters()), 0.05)
        for name, parameter in model.named_parameters():
            state.fast[name].mul_(decay).add_(parameter, alpha=1 - decay)
