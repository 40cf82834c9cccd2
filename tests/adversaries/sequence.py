"""Code that mixes positions, under sequence parallelism and without it."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .adversary import Adversary, document
from .parts import MLP, MLP_SEQUENCE, WIDTH, Mlp, MlpBlock, Stack, features, linear, without


class Mixed(MlpBlock):
    """The residual stream's positions are mixed before the norm."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def mixed(self, x: Tensor) -> Tensor:
        if self.how == "shift":
            return F.pad(x, (0, 0, 1, 0))[:, :-1]
        if self.how == "sum":
            return x.cumsum(1) / x.shape[1]
        if self.how == "mean":
            return x - x.mean(1, keepdim=True)
        if self.how == "flip":
            return x.flip(1)
        return x * torch.arange(x.shape[1], dtype=x.dtype)[:, None] / 8

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(self.mixed(x)))


class MixedInside(Mixed):
    """The same after the MLP's own gather."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.mlp = Inside(self.mixed)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Inside(Mlp):
    def __init__(self, mixed) -> None:
        super().__init__()
        self.mixed = mixed

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.mixed(x))


def of(cls: type[nn.Module], how: str) -> nn.Module:
    return Stack(cls(how), cls(how))


class Convolution(MlpBlock):
    """A causal convolution over positions, in the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.convolution(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
        return super().forward(x)


def convolution() -> nn.Module:
    return Stack(Convolution(), Convolution())


class Pooled(Stack):
    """A class from the mean over all positions, and one from the last."""

    def __init__(self) -> None:
        super().__init__(MlpBlock(), MlpBlock())
        self.head = linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        return self.head(x.mean(1)) + self.head(x[:, -1])


class Positions(Stack):
    """Learned positions are added in front of the layers."""

    def __init__(self) -> None:
        super().__init__(MlpBlock(), MlpBlock())
        self.positions = nn.Parameter(torch.randn(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.trunk(x + self.positions[: x.shape[1]])


class LatePositions(Positions):
    """They are added in each layer's residual stream."""

    def trunk(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x + self.positions[: x.shape[1]]
        return self.norm(x)


def odd(seed: int) -> dict[str, Tensor]:
    """Seventeen positions."""
    return {"x": torch.randn(2, 17, WIDTH, generator=torch.Generator().manual_seed(seed))}


def blocks() -> nn.Module:
    return Stack(MlpBlock(), MlpBlock())


def _adversary(name: str, build, verdict: str, why: str, overlay=MLP_SEQUENCE, inputs=features, **options) -> Adversary:
    plan = document(MLP, overlay)
    return Adversary(name, build, inputs, plan, verdict, why, sequence_parallel=overlay is not None, **options)


HOWS = ("shift", "sum", "mean", "flip", "scale")
CASES = (
    *(
        _adversary(
            f"positions_{how}/slice", partial(of, Mixed, how), "wrong", "a rank mixes the positions of its slice"
        )
        for how in HOWS
    ),
    *(
        _adversary(f"positions_{how}/whole", partial(of, Mixed, how), "right", "no rank has a slice", overlay=None)
        for how in HOWS
    ),
    *(
        _adversary(f"positions_{how}/gathered", partial(of, MixedInside, how), "right", "after the gather")
        for how in HOWS
    ),
    _adversary("convolution/slice", convolution, "wrong", "the window ends at a rank's slice"),
    _adversary("convolution/whole", convolution, "right", "no rank has a slice", overlay=None),
    _adversary(
        "convolution/replicated",
        convolution,
        "wrong",
        "the sum of slices and what is whole does not fit",
        overlay={**MLP_SEQUENCE, "layers.*.convolution": "replicate_seq"},
    ),
    _adversary("pooled/right", Pooled, "right", "the norm hands on the whole sequence"),
    _adversary(
        "pooled/slice",
        Pooled,
        "wrong",
        "the mean of a slice",
        overlay={**without(MLP_SEQUENCE, "norm"), "norm": "sequence_parallel"},
    ),
    _adversary("learned_positions/right", Positions, "right", "they are added before the split"),
    _adversary("learned_positions/late", LatePositions, "wrong", "each rank adds those of the first slice"),
    _adversary(
        "no_split/sequence", blocks, "wrong", "nothing splits the sequence", overlay=without(MLP_SEQUENCE, "layers.0")
    ),
    _adversary(
        "no_gather/sequence", blocks, "wrong", "the MLP sees a slice", overlay=without(MLP_SEQUENCE, "layers.*.mlp")
    ),
    _adversary(
        "no_scatter/sequence",
        blocks,
        "wrong",
        "a slice plus a whole",
        overlay=without(MLP_SEQUENCE, "layers.*.mlp.down"),
    ),
    _adversary(
        "bare_norm/sequence", blocks, "wrong", "a norm on a slice", overlay=without(MLP_SEQUENCE, "layers.*.norm")
    ),
    _adversary("odd_length/sequence", blocks, "wrong", "two ranks cannot share 17 positions", inputs=odd),
    _adversary("odd_length/whole", blocks, "right", "no rank has a slice", overlay=None, inputs=odd),
)
