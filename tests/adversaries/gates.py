"""Branches that are hard to see: closed by a zero, or scaled down; and what has no part in a result."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .adversary import Adversary, document
from .parts import (
    ATTENTION,
    ATTENTION_NORMS,
    MLP,
    PARTIAL,
    WIDTH,
    Attention,
    Mlp,
    MlpBlock,
    Stack,
    features,
    linear,
    without,
)


class Gated(MlpBlock):
    """The MLP's branch times a gate that is a buffer, zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gate", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.mlp(self.norm(x))


class GatedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), Attention(norm=True)
        self.register_buffer("gate", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.attn(self.norm(x))


def gated() -> nn.Module:
    return Stack(Gated(), Gated())


def gated_attention() -> nn.Module:
    return Stack(GatedAttention(), GatedAttention())


def opened(model: nn.Module, step: int) -> None:
    """The gates open after the first step."""
    for name, buffer in model.named_buffers():
        if name.endswith("gate"):
            buffer.fill_(0.5 * step)


class Rezero(MlpBlock):
    """The MLP's branch times a trained number, zero at first."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.alpha * self.mlp(self.norm(x))


def rezero(size: int = 1) -> nn.Module:
    return Stack(Rezero(size), Rezero(size))


class Faint(MlpBlock):
    """The MLP's branch, scaled down."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.mlp(self.norm(x))


def faint(scale: float = 1e-5) -> nn.Module:
    return Stack(Faint(scale), Faint(scale))


class FaintInside(Mlp):
    """A number that is read off the whole input is added to what is split, scaled down."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.hidden(x) * (1 + 1e-5 * self.gate(x)))


def faint_inside() -> nn.Module:
    return Stack(MlpBlock(FaintInside()), MlpBlock(FaintInside()))


class OpenGate(FaintInside):
    """The same at its full size."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.hidden(x) * torch.sigmoid(self.gate(x)))


def open_gate() -> nn.Module:
    return Stack(MlpBlock(OpenGate()), MlpBlock(OpenGate()))


class NoPart(Stack):
    """Every parameter has a part of zero in the loss, so that each has a gradient."""

    def __init__(self) -> None:
        super().__init__(MlpBlock(), MlpBlock())
        self.idle = linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        h = self.layers[0].mlp.hidden(x)
        return self.trunk(x) + 0.0 * self.idle(x).sum() + 0.0 * h.sum()


class Masked(MlpBlock):
    """Of the branch's result only some tokens are taken."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(x.shape[1]) % 2 == 0
        return torch.where(mask[:, None], x, x + self.mlp(self.norm(x)))


def masked() -> nn.Module:
    return Stack(Masked(), Masked())


class MaskedByValue(MlpBlock):
    """Where a value is large, the branch counts; in most batches it is nowhere."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 8, self.mlp(self.norm(x)), x)


def masked_by_value() -> nn.Module:
    return Stack(MaskedByValue())


def large(seed: int) -> dict[str, Tensor]:
    """From the third batch on, some values are large."""
    made = features(seed)
    return made if seed < 2 else {"x": made["x"] * 10}


class Clamped(MlpBlock):
    """The branch's result is clamped to what it never reaches."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x)).clamp(-1e6, 1e6)


def clamped() -> nn.Module:
    return Stack(Clamped(), Clamped())


NO_SUM = {**without(MLP, "layers.*.mlp.down"), "layers.*.mlp.down.weight": "rowwise"}
DOORED = {**MLP, "layers.*.mlp": "input_with_grad_allreduce", "layers.*.mlp.gate": PARTIAL}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "zero_gate": (gated, {"before": opened}),
    "rezero": (rezero, {"stirred": False}),
    "rezero_vector": (partial(rezero, WIDTH), {"stirred": False}),
    "faint": (faint, {"exact": True}),
    "very_faint": (partial(faint, 1e-7), {"exact": True}),
    "masked": (masked, {}),
    "clamped": (clamped, {}),
}
CASES = (
    *(
        case
        for name, (build, options) in MODELS.items()
        for case in (
            Adversary(f"{name}/right", build, features, document(MLP), "right", "the sum is there", **options),
            Adversary(
                f"{name}/no_sum", build, features, document(NO_SUM), "wrong", "nobody adds the branch up", **options
            ),
        )
    ),
    Adversary(
        "zero_gate_norm/right",
        gated_attention,
        features,
        document(ATTENTION_NORMS),
        "right",
        "all rules",
        before=opened,
    ),
    Adversary(
        "zero_gate_norm/bare",
        gated_attention,
        features,
        document(ATTENTION),
        "wrong",
        "no gradient reaches the norms while the gate is closed",
        before=opened,
    ),
    Adversary("faint_inside/right", faint_inside, features, document(DOORED), "right", "all rules"),
    Adversary(
        "faint_inside/bare_gate",
        faint_inside,
        features,
        document(without(DOORED, "layers.*.mlp.gate")),
        "wrong",
        "the gate multiplies a rank's own features",
    ),
    Adversary("open_gate/right", open_gate, features, document(DOORED), "right", "all rules"),
    Adversary(
        "open_gate/bare_gate", open_gate, features, document(without(DOORED, "layers.*.mlp.gate")), "wrong", "as above"
    ),
    Adversary(
        "open_gate/no_door",
        open_gate,
        features,
        document({**MLP, "layers.*.mlp.gate": PARTIAL}),
        "wrong",
        "the gate's share of the input's gradient is not added up",
    ),
    Adversary("no_part/right", NoPart, features, document(MLP), "right", "zero times a slice is no slice"),
    Adversary(
        "masked_by_value/right", masked_by_value, large, document(MLP), "right", "the sum is there", codes=("SP421",)
    ),
    Adversary(
        "masked_by_value/no_sum",
        masked_by_value,
        large,
        document(NO_SUM),
        "wrong",
        "it shows only where a value is large",
        known="no batch of the proof has such a value, and the operation runs in every batch",
    ),
)
