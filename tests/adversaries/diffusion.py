"""Diffusion transformers: a condition scales, shifts and gates what a block does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .adversary import Adversary, document
from .parts import (
    ATTENTION,
    LENGTH,
    MLP,
    PARTIAL,
    WIDTH,
    Attention,
    Mlp,
    linear,
    without,
)


class DitBlock(nn.Module):
    """Two norms without weights, and six vectors from the condition (adaLN)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.attn, self.mlp, self.modulation = Attention(), Mlp(), linear(WIDTH, 6 * WIDTH, bias=True)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        parts = self.modulation(torch.nn.functional.silu(condition))[:, None].chunk(6, dim=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        x = x + gate1 * self.attn(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class Dit(nn.Module):
    """Patches and a time in, the noise out."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(linear(WIDTH, WIDTH, bias=True), nn.SiLU(), linear(WIDTH, WIDTH, bias=True))
        self.patch, self.layers = linear(8, WIDTH, bias=True), nn.ModuleList([DitBlock(), DitBlock()])
        self.norm, self.head = nn.LayerNorm(WIDTH), linear(WIDTH, 8)

    def forward(self, x: Tensor, time: Tensor) -> Any:
        angle = time[:, None] * torch.logspace(0, -3, WIDTH // 2, dtype=x.dtype)
        condition = self.time(torch.cat([angle.sin(), angle.cos()], -1))
        x = self.patch(x)
        for layer in self.layers:
            x = layer(x, condition)
        return {"sample": self.head(self.norm(x))}


class InnerDitBlock(DitBlock):
    """The condition also scales the hidden values of the MLP."""

    def __init__(self) -> None:
        super().__init__()
        del self.modulation
        self.inner = linear(WIDTH, 32)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp.down(self.mlp.hidden(self.norm2(x)) * (1 + self.inner(condition))[:, None])


class InnerDit(Dit):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([InnerDitBlock(), InnerDitBlock()])


def patches(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(2, LENGTH, 8, generator=generator), "time": torch.rand(2, generator=generator)}


DIT = {**ATTENTION, **MLP}
DIT_SEQUENCE = {
    "layers.0": "split_seq_input",
    "layers.*.{attn,mlp}": "gather_seq_input",
    "layers.*.attn.o": "rowwise_seq",
    "layers.*.mlp.down": "rowwise_seq",
    "norm": {"style": "sequence_parallel", "output": "gather"},
}
CONDITIONED = {**DIT_SEQUENCE, "layers.*.modulation": {"style": PARTIAL}}
CASES = (
    Adversary("dit/right", Dit, patches, document(DIT), "right", "the condition is whole"),
    Adversary(
        "dit/gathered",
        Dit,
        patches,
        document({**DIT, "layers.*.modulation": "colwise_gather_output"}),
        "right",
        "the six vectors are gathered",
    ),
    Adversary(
        "dit/split_modulation",
        Dit,
        patches,
        document({**DIT, "layers.*.modulation": "colwise"}),
        "wrong",
        "a rank has three of six vectors",
    ),
    Adversary(
        "dit/no_sum",
        Dit,
        patches,
        document({**without(DIT, "layers.*.attn.o"), "layers.*.attn.o.weight": "rowwise"}),
        "wrong",
        "nobody adds attention up",
    ),
    Adversary(
        "dit/sequence",
        Dit,
        patches,
        document(DIT, DIT_SEQUENCE),
        "wrong",
        "the condition's gradient is over a slice of the sequence",
        sequence_parallel=True,
    ),
    Adversary(
        "dit/sequence_modulation",
        Dit,
        patches,
        document(DIT, CONDITIONED),
        "wrong",
        "the modulation's own gradient is reduced, not that of the condition before it",
        sequence_parallel=True,
    ),
    Adversary(
        "dit/sequence_time",
        Dit,
        patches,
        document(DIT, {**CONDITIONED, "time.0": PARTIAL, "time.2": PARTIAL}),
        "right",
        "every reader of the condition is reduced",
        sequence_parallel=True,
    ),
    Adversary(
        "dit/sequence_door",
        Dit,
        patches,
        document(DIT, {**CONDITIONED, "time": "output_with_grad_allreduce"}),
        "right",
        "the condition's gradient is reduced where it is made",
        sequence_parallel=True,
    ),
    Adversary(
        "inner_dit/right",
        InnerDit,
        patches,
        document({**DIT, "layers.*.inner": "colwise"}),
        "right",
        "the condition's slice scales a slice",
    ),
    Adversary(
        "inner_dit/gathered",
        InnerDit,
        patches,
        document({**DIT, "layers.*.inner": "colwise_gather_output"}),
        "wrong",
        "the whole scale does not fit the slice",
    ),
)
