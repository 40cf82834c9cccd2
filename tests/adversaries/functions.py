"""Code that the recorder may not see into: autograd functions, checkpoints in code, scripts, vmap."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .adversary import Adversary, document
from .parts import (
    ATTENTION,
    ATTENTION_NORMS,
    BLOCK_SEQUENCE,
    MLP,
    MLP_DOOR,
    MLP_SEQUENCE,
    Attention,
    Block,
    Mlp,
    MlpBlock,
    Stack,
    features,
)


class Recomputed(torch.autograd.Function):
    """Runs a module without a graph, and again in backward: a checkpoint of one's own."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.module, ctx.count = module, len(parameters)
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.module(x), grad)
        return None, x.grad, *[None] * ctx.count


class OwnCheckpoint(Block):
    """Attention runs inside of a function that has captured it."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + Recomputed.apply(self.attn, self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TorchCheckpoint(Block):
    """Attention runs inside of torch's checkpoint."""

    def __init__(self, attn: nn.Module, reentrant: bool) -> None:
        super().__init__(attn)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x + checkpoint(self.attn, self.norm1(x), use_reentrant=self.reentrant)
        return x + self.mlp(self.norm2(x))


class CheckpointedStack(Stack):
    """Each layer runs inside of torch's checkpoint."""

    def __init__(self, *layers: nn.Module, reentrant: bool) -> None:
        super().__init__(*layers)
        self.reentrant = reentrant

    def trunk(self, x: Tensor) -> Tensor:
        x = x * 1.0 if not self.reentrant else (x * 1.0).requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.norm(x)


def own_checkpoint() -> nn.Module:
    return Stack(*(OwnCheckpoint(Attention(norm=True)) for _ in range(2)))


def torch_checkpoint(reentrant: bool) -> nn.Module:
    return Stack(*(TorchCheckpoint(Attention(norm=True), reentrant) for _ in range(2)))


def checkpointed(reentrant: bool) -> nn.Module:
    return CheckpointedStack(*(Block(Attention(norm=True)) for _ in range(2)), reentrant=reentrant)


class Backward(torch.autograd.Function):
    """The same value, and some other gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: str) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.change == "clip":
            grad = grad.clamp(-1e-3, 1e-3)
        elif ctx.change == "unit":
            grad = grad / grad.norm()
        elif ctx.change == "centre":
            grad = grad - grad.mean(-1, keepdim=True)
        elif ctx.change == "sign":
            grad = grad.sign()
        elif ctx.change == "reverse":
            grad = -0.5 * grad
        return grad, None


class Straight(torch.autograd.Function):
    """Rounding with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Changed(Mlp):
    """Another gradient for the hidden values, for the input, or for the output."""

    def __init__(self, change: str, place: str) -> None:
        super().__init__()
        self.change, self.place = change, place

    def forward(self, x: Tensor) -> Tensor:
        if self.place == "input":
            x = Backward.apply(x, self.change)
        h = self.hidden(x)
        if self.place == "hidden":
            h = Backward.apply(h, self.change)
        y = self.down(h)
        return Backward.apply(y, self.change) if self.place == "output" else y


def changed(change: str, place: str) -> nn.Module:
    return Stack(MlpBlock(Changed(change, place)), MlpBlock(Changed(change, place)))


class Rounded(Mlp):
    def hidden(self, x: Tensor) -> Tensor:
        return Straight.apply(self.up(x))


def rounded() -> nn.Module:
    return Stack(MlpBlock(Rounded()))


class Scaled(torch.autograd.Function):
    """x times a factor, with the factor's gradient written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(x, factor)
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, factor = ctx.saved_tensors
        return grad * factor, (grad * x).sum()


class WithFactor(Mlp):
    """One trained number scales the hidden values."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(Scaled.apply(self.hidden(x), self.factor))


def with_factor() -> nn.Module:
    return Stack(MlpBlock(WithFactor()), MlpBlock(WithFactor()))


@torch.jit.script
def scripted_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x)))


@torch.jit.script
def scripted_norm(x: Tensor) -> Tensor:
    return x / (1.0 + x.square().mean(-1, keepdim=True))


class Scripted(Mlp):
    def __init__(self, normalised: bool = False) -> None:
        super().__init__()
        self.normalised = normalised

    def forward(self, x: Tensor) -> Tensor:
        h = scripted_gelu(self.up(x))
        return self.down(scripted_norm(h) if self.normalised else h)


def scripted(normalised: bool = False) -> nn.Module:
    return Stack(MlpBlock(Scripted(normalised)), MlpBlock(Scripted(normalised)))


class Vmapped(Mlp):
    """The activation is mapped over the tokens."""

    def __init__(self, normalised: bool = False) -> None:
        super().__init__()
        self.normalised = normalised

    def hidden(self, x: Tensor) -> Tensor:
        def one(row: Tensor) -> Tensor:
            return row / (1 + row.square().mean()) if self.normalised else F.silu(row) * row

        return torch.vmap(torch.vmap(one))(self.up(x))


def vmapped(normalised: bool = False) -> nn.Module:
    return Stack(MlpBlock(Vmapped(normalised)), MlpBlock(Vmapped(normalised)))


def _adversary(name: str, build, rules, verdict: str, why: str, overlay=None, **options) -> Adversary:
    on = overlay is not None
    return Adversary(name, build, features, document(rules, overlay), verdict, why, sequence_parallel=on, **options)


NORMS, BARE = {**ATTENTION_NORMS, **MLP}, {**ATTENTION, **MLP}
NO_NORM = "the norms of queries and keys see a rank's heads"
MODELS = {
    "own_checkpoint": own_checkpoint,
    "reentrant": partial(torch_checkpoint, True),
    "not_reentrant": partial(torch_checkpoint, False),
    "reentrant_layers": partial(checkpointed, True),
    "not_reentrant_layers": partial(checkpointed, False),
}
REENTRANT = {"own_checkpoint": ("SP407",), "reentrant": ("SP407",), "reentrant_layers": ("SP407",)}
CASES = (
    *(
        case
        for name, build in MODELS.items()
        for case in (
            _adversary(f"{name}/right", build, NORMS, "right", "with all its rules", codes=REENTRANT.get(name, ())),
            _adversary(f"{name}/bare_norm", build, BARE, "wrong", NO_NORM),
        )
    ),
    *(
        _adversary(
            f"{name}/sequence",
            build,
            NORMS,
            "right",
            "with all its rules",
            BLOCK_SEQUENCE,
            codes=REENTRANT.get(name, ()),
        )
        for name, build in MODELS.items()
    ),
    *(
        _adversary(
            f"backward/{change}_{place}{'_door' if rules is MLP_DOOR else ''}",
            partial(changed, change, place),
            rules,
            verdict,
            why,
        )
        for change, place, rules, verdict, why in (
            ("clip", "hidden", MLP, "right", "each element of a slice is clipped by itself"),
            ("sign", "hidden", MLP, "right", "the sign of each element of a slice"),
            ("unit", "hidden", MLP, "wrong", "each rank divides by the length of its own slice"),
            ("centre", "hidden", MLP, "wrong", "each rank takes off the mean of its own features"),
            ("reverse", "hidden", MLP, "right", "linear, element by element"),
            ("clip", "input", MLP, "right", "the gradient is complete before the matrix's own reduction"),
            ("clip", "input", MLP_DOOR, "wrong", "each rank clips its own summand"),
            ("sign", "input", MLP_DOOR, "wrong", "the sign of a summand"),
            ("unit", "input", MLP_DOOR, "wrong", "each rank divides by the length of its own summand"),
            ("centre", "input", MLP_DOOR, "right", "linear, and over a dim that is whole"),
            ("reverse", "input", MLP_DOOR, "right", "linear"),
            ("unit", "output", MLP, "right", "the gradient there is complete"),
        )
    ),
    _adversary(
        "backward/unit_sequence",
        partial(changed, "unit", "output"),
        MLP,
        "wrong",
        "the gradient is a slice of the sequence, each rank divides by the length of its own",
        MLP_SEQUENCE,
    ),
    _adversary("straight_through/right", rounded, MLP, "right", "element by element"),
    _adversary("factor/bare", with_factor, MLP, "wrong", "the factor's gradient is a sum over a rank's own features"),
    _adversary(
        "factor/right",
        with_factor,
        {**MLP, "layers.*.mlp.factor": "replicated_with_grad_allreduce"},
        "right",
        "the factor's gradient is reduced",
    ),
    _adversary("scripted/right", scripted, MLP, "right", "element by element"),
    _adversary("scripted/sequence", scripted, MLP, "right", "element by element", MLP_SEQUENCE),
    _adversary("scripted/normalised", partial(scripted, True), MLP, "wrong", "the mean of a rank's own features"),
    _adversary("vmap/right", vmapped, MLP, "right", "element by element"),
    _adversary("vmap/normalised", partial(vmapped, True), MLP, "wrong", "the mean of a rank's own features"),
)
