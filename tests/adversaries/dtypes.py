"""Models that compute in other dtypes than their parameters have, or whose parameters are in several."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from .adversary import Adversary, document
from .parts import (
    ATTENTION,
    ATTENTION_NORMS,
    BLOCK_SEQUENCE,
    MLP,
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


def of_mlp(cls: type[nn.Module]) -> nn.Module:
    return Stack(MlpBlock(cls()), MlpBlock(cls()))


def of_attention(cls: type[nn.Module]) -> nn.Module:
    return Stack(*(Block(cls(norm=True)) for _ in range(2)))


def half() -> nn.Module:
    """All of it in bfloat16."""
    return Stack(MlpBlock(), MlpBlock()).bfloat16()


def half_features(seed: int) -> dict[str, Tensor]:
    return {"x": features(seed)["x"].bfloat16()}


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
)
