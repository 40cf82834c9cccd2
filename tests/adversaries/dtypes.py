"""Models that compute in other dtypes than their parameters have, or whose parameters are in several."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .adversary import Adversary, Verdict, document
from .parts import (
    ATTENTION,
    ATTENTION_NORMS,
    BLOCK_SEQUENCE,
    MLP,
    WIDTH,
    Attention,
    Block,
    Mlp,
    MlpBlock,
    Stack,
    features,
    without,
)

BF16 = 0.1  # a few roundings to 8 bits, in gradients that are sums of many


class Cast(Mlp):
    """Computes in bfloat16, with parameters in it."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(torch.bfloat16)).to(x.dtype)


class CastWeights(Mlp):
    """Casts to the dtype of its second matrix, which is another than the first's."""

    def __init__(self) -> None:
        super().__init__()
        self.down.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.hidden(x).to(self.down.weight.dtype)).to(x.dtype)


class Exact(Mlp):
    """An activation in float64."""

    def hidden(self, x: Tensor) -> Tensor:
        return self.up(x).double().tanh().to(x.dtype)


class Autocast(Mlp):
    """torch.autocast inside of a forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).to(x.dtype)


class AutocastNorm(Mlp):
    """The same, normalised over what is split."""

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        return h / (1 + h.float().square().sum(-1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).to(x.dtype)


class AutocastAttention(Attention):
    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x, other).to(x.dtype)


class Rotary(Attention):
    """Queries and keys are turned as complex numbers."""

    def heads(self, x: Tensor) -> Tensor:
        heads = super().heads(x)
        pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)).contiguous())
        angle = torch.arange(x.shape[1], dtype=heads.dtype)[:, None] * torch.tensor([1.0, 0.1], dtype=heads.dtype)
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


class HardFloat(Mlp):
    """A matrix in the dtype of the section meets a value in float32."""

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x).float()


class RoundTrip(Mlp):
    """An activation in float32, and back."""

    def hidden(self, x: Tensor) -> Tensor:
        return self.up(x).float().tanh().to(x.dtype)


class BareBuffer(Mlp):
    """A buffer, which FSDP2 does not cast."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((), 0.5).expand(WIDTH).clone())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class CastBuffer(BareBuffer):
    """The same buffer, in the dtype of what it multiplies."""

    def forward(self, x: Tensor) -> Tensor:
        return Mlp.forward(self, x) * self.scale.to(x.dtype)


class CentredInHalf(Mlp):
    """Other code where the dtype is lower: centred over what is split."""

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        return h if h.dtype in (torch.float32, torch.float64) else h - h.mean(-1, keepdim=True)


class NormedInHalf(Mlp):
    """The same, normalised."""

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        return h if h.dtype in (torch.float32, torch.float64) else h.softmax(-1)


class _Clipped(torch.autograd.Function):
    """Divides a gradient in a lower precision by its norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        return gradient if gradient.dtype in (torch.float32, torch.float64) else gradient / gradient.norm()


class ClippedInHalf(Mlp):
    """The gradient of a rank's own features is normalised."""

    def hidden(self, x: Tensor) -> Tensor:
        return _Clipped.apply(super().hidden(x))


class Scaled(Mlp):
    """Other code where the dtype is lower, which is right on slices."""

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        return h if h.dtype in (torch.float32, torch.float64) else 1.0009765625 * h


class Filled(Mlp):
    """A constant that float16 does not have."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        return h.masked_fill(torch.zeros_like(h, dtype=torch.bool), -1e9)


class Lowest(Mlp):
    """The lowest number of the dtype."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        return h.masked_fill(torch.zeros_like(h, dtype=torch.bool), torch.finfo(h.dtype).min)


class Infinite(Mlp):
    """Zero times a number that is infinite in float16."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        return h + torch.zeros_like(h) * torch.tensor(-1e9).to(h.dtype)


def of_mlp(cls: type[nn.Module]) -> nn.Module:
    return Stack(MlpBlock(cls()), MlpBlock(cls()))


def of_attention(cls: type[nn.Module]) -> nn.Module:
    return Stack(*(Block(cls(norm=True)) for _ in range(2)))


def half() -> nn.Module:
    """All of it in bfloat16."""
    return Stack(MlpBlock(), MlpBlock()).bfloat16()


def half_features(seed: int) -> dict[str, Tensor]:
    return {"x": features(seed)["x"].bfloat16()}


def in_section(
    name: str,
    cls: type[nn.Module],
    verdict: Verdict,
    why: str,
    param: str = "bfloat16",
    mesh: Mapping[str, int] | None = None,
    sequence: bool = False,
    **precision: Any,
) -> Adversary:
    """A model with a section whose dtypes are lower than its own."""
    attention = issubclass(cls, Attention)
    rules = document(NORMS if attention else MLP, BLOCK_SEQUENCE if attention else None)
    section = {
        "backend": "fsdp2",
        "units": ["layers.*"],
        "mixed_precision": {"param": param, "reduce": "float32", **precision},
    }
    return Adversary(
        f"section_{name}",
        partial(of_attention if attention else of_mlp, cls),
        features,
        {**rules, "data_parallel": section},
        verdict,
        why,
        codes=() if verdict == "right" else ("SP424",),
        mesh=mesh or {"tp": 2},
        sequence_parallel=sequence,
        rounding=BF16,
    )


NO_SUM = {**without(MLP, "layers.*.mlp.down"), "layers.*.mlp.down.weight": "rowwise"}
NORMS, BARE = {**ATTENTION_NORMS, **MLP}, {**ATTENTION, **MLP}
MODELS = {"cast": Cast, "cast_weights": CastWeights, "autocast": Autocast}
CASES = (
    *(
        case
        for name, cls in MODELS.items()
        for case in (
            Adversary(
                f"{name}/right", partial(of_mlp, cls), features, document(MLP), "right", "all rules", rounding=BF16
            ),
            Adversary(
                f"{name}/no_sum", partial(of_mlp, cls), features, document(NO_SUM), "wrong", "no sum", rounding=BF16
            ),
        )
    ),
    Adversary(
        "autocast/normalised",
        partial(of_mlp, AutocastNorm),
        features,
        document(MLP),
        "wrong",
        "a sum over a rank's own features",
        rounding=BF16,
    ),
    Adversary(
        "autocast_attention/right",
        partial(of_attention, AutocastAttention),
        features,
        document(NORMS),
        "right",
        "all rules",
        rounding=BF16,
    ),
    Adversary(
        "autocast_attention/bare_norm",
        partial(of_attention, AutocastAttention),
        features,
        document(BARE),
        "wrong",
        "the norms see a rank's heads",
        rounding=BF16,
    ),
    Adversary(
        "autocast_attention/sequence",
        partial(of_attention, AutocastAttention),
        features,
        document(NORMS, BLOCK_SEQUENCE),
        "right",
        "all rules",
        sequence_parallel=True,
        rounding=BF16,
    ),
    Adversary("exact/right", partial(of_mlp, Exact), features, document(MLP), "right", "element by element"),
    Adversary("exact/no_sum", partial(of_mlp, Exact), features, document(NO_SUM), "wrong", "no sum"),
    Adversary("half/right", half, half_features, document(MLP), "right", "all rules", rounding=BF16),
    Adversary("half/no_sum", half, half_features, document(NO_SUM), "wrong", "no sum", rounding=BF16),
    Adversary("rotary/right", partial(of_attention, Rotary), features, document(NORMS), "right", "head by head"),
    Adversary("rotary/bare_norm", partial(of_attention, Rotary), features, document(BARE), "wrong", "a rank's heads"),
    in_section("plain", Mlp, "right", "all rules"),
    in_section("float16", Mlp, "right", "all rules", "float16"),
    in_section("reduced", Mlp, "right", "gradients are added up in it", reduce="bfloat16"),
    in_section("output", Mlp, "right", "the output is cast", output="float32"),
    in_section("data_parallel", Mlp, "right", "all rules", mesh={"dp_shard": 2, "tp": 2}),
    in_section("attention", Attention, "right", "all rules"),
    in_section("attention_sequence", Attention, "right", "all rules", sequence=True),
    in_section("round_trip", RoundTrip, "right", "element by element"),
    in_section("cast_buffer", CastBuffer, "right", "the buffer is cast"),
    in_section("scaled", Scaled, "right", "the branch is element by element"),
    in_section("lowest", Lowest, "right", "the dtype's own number", "float16"),
    in_section("hard_float", HardFloat, "wrong", "a product of two dtypes"),
    in_section("bare_buffer", BareBuffer, "wrong", "a buffer in float32 makes the norm's input float32"),
    in_section("centred", CentredInHalf, "wrong", "a mean over a rank's own features, in this dtype alone"),
    in_section("normed", NormedInHalf, "wrong", "a sum over a rank's own features, in this dtype alone"),
    in_section("clipped", ClippedInHalf, "wrong", "a norm over a rank's own gradient, in this dtype alone"),
    in_section("filled", Filled, "wrong", "the number is too large", "float16"),
    in_section("infinite", Infinite, "wrong", "not a number", "float16"),
)
