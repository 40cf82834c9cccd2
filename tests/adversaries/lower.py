"""Lower dtypes where no rank has a slice: pipeline stages, data-parallel ranks alone, and torch.autocast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .adversary import Adversary, Verdict, document
from .dtypes import (
    BF16,
    BareBuffer,
    CastBuffer,
    CentredInHalf,
    ClippedInHalf,
    Filled,
    HardFloat,
    Infinite,
    Lowest,
    NormedInHalf,
    RoundTrip,
    Scaled,
    of_mlp,
)
from .meshes import MESHES
from .parts import MLP, Mlp, MlpBlock, features
from .stages import Own, pairs, squared


class Wide(MlpBlock):
    """The residual stream is in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float() + self.mlp(self.norm(x.to(self.norm.weight.dtype)))


class Narrowed(Wide):
    """Other code for a stream in a lower dtype."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if x.dtype in (torch.float32, torch.float64) else y - y.mean(-1, keepdim=True)


class WideOwn(Own):
    """The stream begins in float32."""

    def trunk(self, x: Tensor) -> Tensor:
        x = x.float() if x.dtype != torch.float64 else x
        for layer in self.layers:
            x = layer(x)
        return self.norm(x.to(self.norm.weight.dtype))


class Clock(nn.Module):
    """Times that a lower dtype does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return 256.0 + torch.arange(x.shape[1], dtype=torch.float32)


class OddBlock(MlpBlock):
    """What it does depends on the time."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return super().forward(x) * (1 + t % 2).to(x.dtype)[:, None]


class Timed(Own):
    """Each block is told the time."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.clock = Clock()

    def trunk(self, x: Tensor) -> Tensor:
        t = self.clock(x)
        for layer in self.layers:
            x = layer(x, t)
        return self.norm(x)


def of_blocks(model: type[nn.Module], block: type[nn.Module]) -> nn.Module:
    return model(block(), block())


def of_own(cls: type[nn.Module]) -> nn.Module:
    return Own(MlpBlock(cls()), MlpBlock(cls()))


def staged(
    name: str,
    build: Any,
    verdict: Verdict,
    why: str,
    mesh: str = "pp_dp",
    param: str = "bfloat16",
    units: tuple[str, ...] = ("layers.*",),
    carry: tuple[str, ...] = (),
    **precision: Any,
) -> Adversary:
    plan = {
        "version": "1",
        "name": "own",
        "tensor_parallel": {"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"},
        "data_parallel": {
            "backend": "fsdp2",
            "units": list(units),
            "mixed_precision": {"param": param, "reduce": "float32", **precision},
        },
        "pipeline_parallel": {"layers": "layers.*", **({"carry": list(carry)} if carry else {})},
    }
    return Adversary(
        f"lower_stage_{name}/{mesh}",
        build,
        pairs,
        plan,
        verdict,
        why,
        codes=() if verdict == "right" else ("SP424",),
        mesh=MESHES[mesh],
        stage_loss=squared,
        rounding=BF16,
    )


def alone(name: str, cls: type[nn.Module], verdict: Verdict, why: str, param: str = "bfloat16") -> Adversary:
    """Data-parallel ranks, and nothing is split."""
    section = {
        "backend": "fsdp2",
        "units": ["layers.*"],
        "mixed_precision": {"param": param, "reduce": "float32"},
    }
    return Adversary(
        f"lower_data_{name}",
        partial(of_mlp, cls),
        features,
        {**document(MLP), "data_parallel": section},
        verdict,
        why,
        codes=() if verdict == "right" else ("SP424",),
        mesh={"dp_shard": 2},
        rounding=BF16,
    )


def autocast(
    name: str,
    cls: type[nn.Module],
    verdict: Verdict,
    why: str,
    dtype: str = "bfloat16",
    mesh: Mapping[str, int] | None = None,
) -> Adversary:
    """`apply_plan` is told the dtype, and proves the plan in it."""
    return Adversary(
        f"lower_autocast_{name}",
        partial(of_mlp, cls),
        features,
        {**document(MLP), "data_parallel": {"backend": "fsdp2", "units": ["layers.*"]}},
        verdict,
        why,
        mesh=mesh or {"tp": 2},
        rounding=BF16,
        autocast=dtype,
    )


CASES = (
    staged("plain", partial(of_own, Mlp), "right", "all rules"),
    staged("plain", partial(of_own, Mlp), "right", "all rules", "pp_tp"),
    staged("float16", partial(of_own, Mlp), "right", "all rules", param="float16"),
    staged("reduced", partial(of_own, Mlp), "right", "gradients are added up in it", reduce="bfloat16"),
    staged("round_trip", partial(of_own, RoundTrip), "right", "element by element"),
    staged("cast_buffer", partial(of_own, CastBuffer), "right", "the buffer is cast"),
    staged("wide", partial(of_blocks, WideOwn, Wide), "right", "the hand-over rounds once", units=("norm",)),
    staged("timed_in_code", partial(of_blocks, Timed, OddBlock), "wrong", "units cast the time", carry=("clock",)),
    staged(
        "timed",
        partial(of_blocks, Timed, OddBlock),
        "right",
        "stages do not cast what is carried",
        units=("norm",),
        carry=("clock",),
    ),
    staged(
        "narrowed",
        partial(of_blocks, WideOwn, Narrowed),
        "right",
        "the stream is handed on in its own dtype",
        units=("norm",),
    ),
    staged("hard_float", partial(of_own, HardFloat), "wrong", "a product of two dtypes"),
    staged("filled", partial(of_own, Filled), "wrong", "the number is too large", param="float16"),
    staged("infinite", partial(of_own, Infinite), "wrong", "not a number", param="float16"),
    replace(
        staged("normed", partial(of_own, NormedInHalf), "right", "no rank has a part of the features"),
        known="the model's own code differs from itself: a warning",
    ),
    staged("clipped", partial(of_own, ClippedInHalf), "wrong", "a norm over a rank's own gradient", "pp_tp"),
    alone("plain", Mlp, "right", "all rules"),
    alone("cast_buffer", CastBuffer, "right", "the buffer is cast"),
    alone("lowest", Lowest, "right", "the dtype's own number", "float16"),
    alone("hard_float", HardFloat, "wrong", "a product of two dtypes"),
    alone("bare_buffer", BareBuffer, "wrong", "a buffer in float32 makes the norm's input float32"),
    alone("filled", Filled, "wrong", "the number is too large", "float16"),
    alone("infinite", Infinite, "wrong", "not a number", "float16"),
    autocast("plain", Mlp, "right", "all rules"),
    autocast("round_trip", RoundTrip, "right", "element by element"),
    autocast("scaled", Scaled, "right", "the branch is element by element"),
    autocast("bare_buffer", BareBuffer, "right", "autocast takes any dtypes"),
    autocast("hard_float", HardFloat, "right", "autocast takes any dtypes"),
    autocast("data_parallel", Mlp, "right", "all rules", mesh={"dp_shard": 2, "tp": 2}),
    autocast("centred", CentredInHalf, "raises", "a mean over a rank's own features, in this dtype alone"),
    autocast("normed", NormedInHalf, "raises", "a sum over a rank's own features, in this dtype alone"),
    autocast("clipped", ClippedInHalf, "raises", "a norm over a rank's own gradient, in this dtype alone"),
    autocast("infinite", Infinite, "raises", "not a number", "float16"),
    autocast("alone", Mlp, "right", "all rules", mesh={"dp_shard": 2}),
    autocast("infinite_alone", Infinite, "raises", "not a number", "float16", mesh={"dp_shard": 2}),
)
