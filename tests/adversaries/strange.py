"""Habits of code that is written for one process: parts that are computed again, weights that are changed or read in forward, values that are
changed in place, gradients inside of a forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from .adversary import Adversary, Verdict, document
from .parts import HIDDEN, MLP, MLP_DOOR, Mlp, MlpBlock, Stack, features

Hidden = Callable[[Mlp, Tensor], Tensor]


class Habit(Mlp):
    """Two matrices, and between them a function of the module and its input."""

    def __init__(self, function: Hidden) -> None:
        super().__init__()
        self.function = function
        self.calls, self.last = 0, 0.0

    def hidden(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def up(mlp: Mlp, x: Tensor) -> Tensor:
    return F.gelu(mlp.up(x))


def again(mlp: Mlp, x: Tensor) -> Tensor:
    return checkpoint(partial(up, mlp), x, use_reentrant=False)


def again_normed(mlp: Mlp, x: Tensor) -> Tensor:
    def normed(one: Tensor) -> Tensor:
        h = mlp.up(one)
        return F.layer_norm(h, h.shape[-1:])

    return checkpoint(normed, x, use_reentrant=False)


def unrecorded(mlp: Mlp, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = mlp.up(x).sigmoid()
    return up(mlp, x) * gate


def unrecorded_mean(mlp: Mlp, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = mlp.up(x).mean(-1, keepdim=True).sigmoid()
    return up(mlp, x) * gate


def in_place(mlp: Mlp, x: Tensor) -> Tensor:
    h = mlp.up(x)
    h.mul_(2.0).add_(0.5)
    return F.relu_(h)


def in_place_norm(mlp: Mlp, x: Tensor) -> Tensor:
    h = up(mlp, x)
    return h.clone().div_(h.norm(dim=-1, keepdim=True))


def first_feature(mlp: Mlp, x: Tensor) -> Tensor:
    h = up(mlp, x).clone()
    h[..., 0] = 0.0
    return h


def counted(mlp: Any, x: Tensor) -> Tensor:
    mlp.calls += 1
    return up(mlp, x) * (1 + 0.1 * mlp.calls)


def remembered(mlp: Any, x: Tensor) -> Tensor:
    h = up(mlp, x) / (1 + mlp.last)
    mlp.last = h.detach().abs().mean().item()
    return h


def row_norms(mlp: Mlp, x: Tensor) -> Tensor:
    weight = mlp.up.weight
    return F.gelu(F.linear(x, weight / weight.norm(dim=1, keepdim=True)))


def column_norms(mlp: Mlp, x: Tensor) -> Tensor:
    weight = mlp.up.weight
    return F.gelu(F.linear(x, weight / weight.norm(dim=0, keepdim=True)))


def in_chunks(mlp: Mlp, x: Tensor) -> Tensor:
    return torch.cat([up(mlp, part) for part in x.split(4, dim=1)], 1)


def in_groups(mlp: Mlp, x: Tensor) -> Tensor:
    return F.rms_norm(up(mlp, x).unflatten(-1, (-1, 8)), (8,)).flatten(-2)


def in_two_groups(mlp: Mlp, x: Tensor) -> Tensor:
    h = up(mlp, x)
    return F.rms_norm(h.unflatten(-1, (1, -1)), (h.shape[-1],)).flatten(-2)


def clamped(mlp: Mlp, x: Tensor) -> Tensor:
    h = up(mlp, x)
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return h


def clamped_input(mlp: Mlp, x: Tensor) -> Tensor:
    x = x * 1.0
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return up(mlp, x)


def clamped_summand(mlp: Mlp, x: Tensor) -> Tensor:
    return clamped_input(mlp, x)


def functional(mlp: Mlp, x: Tensor) -> Tensor:
    return F.gelu(functional_call(mlp.up, {"weight": mlp.up.weight * 0.5}, (x,)))


def slope(mlp: Mlp, x: Tensor) -> Tensor:
    """A gradient of each feature by itself."""
    with torch.enable_grad():
        h = mlp.up(x)
        (first,) = torch.autograd.grad(F.gelu(h).sum(), h, create_graph=True)
    return h * first


def slope_by_function(mlp: Mlp, x: Tensor) -> Tensor:
    h = mlp.up(x)
    return h * torch.func.grad(lambda one: F.gelu(one).sum())(h)


def slope_of_length(mlp: Mlp, x: Tensor) -> Tensor:
    h = mlp.up(x)
    return h * torch.func.grad(lambda one: one.norm(dim=-1).sum())(h)


def slope_of_input(mlp: Mlp, x: Tensor) -> Tensor:
    """A gradient that sums over the features."""
    with torch.enable_grad():
        (first,) = torch.autograd.grad(up(mlp, x).sum(), x, create_graph=True)
    return mlp.up(first)


def wide(mlp: Mlp, x: Tensor) -> Tensor:
    return up(mlp, x) * (HIDDEN / mlp.up(x).shape[-1])


def by_rank(mlp: Mlp, x: Tensor) -> Tensor:
    h = up(mlp, x)
    return h + 0.1 * torch.arange(h.shape[-1], dtype=h.dtype)


def flattened(mlp: Mlp, x: Tensor) -> Tensor:
    h = up(mlp, x)
    return h.flatten(0, 1).view(*h.shape)


def rolled(mlp: Mlp, x: Tensor) -> Tensor:
    return up(mlp, x).roll(1, -1)


class Penalised(Stack):
    """The model's own gradient by its input is one of its outputs."""

    def forward(self, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        y = self.trunk(x)
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y, slope


class TiedLater(Stack):
    """Its layers share a matrix from the second call on."""

    def forward(self, x: Tensor) -> Any:
        first, second = self.layers
        if second.mlp.up.weight is not first.mlp.up.weight and getattr(self, "called", False):
            second.mlp.up.weight = first.mlp.up.weight
        self.called = True
        return self.trunk(x)


def of(function: Hidden) -> nn.Module:
    return Stack(MlpBlock(Habit(function)), MlpBlock(Habit(function)))


def penalised() -> nn.Module:
    return Penalised(MlpBlock(), MlpBlock())


def tied_later() -> nn.Module:
    return TiedLater(MlpBlock(), MlpBlock())


def shrink(model: nn.Module, step: int) -> None:
    """Weights are changed between the steps."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def evaluated(model: nn.Module, step: int) -> None:
    """Another mode in every second step."""
    model.train(step % 2 == 0)


def case(function: Hidden, verdict: Verdict, why: str, plan: Any = MLP, **options: Any) -> Adversary:
    name = f"habit_{function.__name__}"
    return Adversary(name, partial(of, function), features, document(plan), verdict, why, **options)


CASES = (
    case(again, "right", "computed again in backward"),
    case(again_normed, "wrong", "a norm of a rank's features, computed again"),
    case(unrecorded, "right", "element by element"),
    case(unrecorded_mean, "wrong", "a mean of a rank's features, which no backward shows"),
    case(in_place, "right", "element by element"),
    case(in_place_norm, "wrong", "a norm of a rank's features"),
    case(first_feature, "wrong", "each rank's first feature"),
    case(counted, "right", "the same number on each rank"),
    case(remembered, "wrong", "a number of a rank's features, in the next step"),
    case(row_norms, "right", "a row is on one rank", MLP_DOOR),
    case(column_norms, "wrong", "a column is on all ranks", MLP_DOOR),
    case(in_chunks, "right", "tokens by themselves"),
    case(in_groups, "right", "groups of 8 are whole"),
    case(in_two_groups, "wrong", "the group is as large as a rank's features"),
    case(clamped, "right", "gradients of a rank's own features"),
    case(clamped_input, "right", "the summands are added up at the matrix"),
    case(clamped_summand, "wrong", "they are added up at the door of the MLP", MLP_DOOR),
    case(functional, "right", "the weight of a call", MLP_DOOR),
    case(slope, "right", "a gradient of each feature by itself"),
    case(slope_by_function, "right", "the same, by torch.func"),
    case(slope_of_length, "wrong", "the gradient of a norm over a rank's features"),
    case(slope_of_input, "wrong", "a sum over a rank's features"),
    case(wide, "wrong", "a width that is a rank's own"),
    case(by_rank, "wrong", "numbers of a rank's own features"),
    case(flattened, "right", "the same values in another shape"),
    case(rolled, "wrong", "the last feature comes from the same rank"),
    Adversary("habit_shrunk", partial(of, up), features, document(MLP), "right", "all weights alike", before=shrink),
    Adversary("habit_evaluated", partial(of, up), features, document(MLP), "right", "no dropout", before=evaluated),
    Adversary("habit_penalised", penalised, features, document(MLP), "refused", "a second backward", codes=("SP404",)),
    Adversary("habit_tied_later", tied_later, features, document(MLP), "right", "both are split alike"),
)
