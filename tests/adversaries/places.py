"""Code that counts the places of a rank's slice from 0, or cuts a table to its length: of short sequences all places are treated alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .adversary import Adversary, document
from .branches import RARE
from .context import EXCHANGED, MESHES, WHOLE, plan
from .parts import ATTENTION, MLP, MLP_SEQUENCE, WIDTH, Attention, Block, MlpBlock, Stack

FIRST = 60


def longer(seed: int) -> dict[str, Tensor]:
    """A rare batch is long."""
    shape = (2, 8 if seed < 100 else 128, WIDTH)
    return {"x": torch.randn(shape, generator=torch.Generator().manual_seed(seed))}


def column(x: Tensor, places: Tensor) -> Tensor:
    return places[:, None].to(x)


def places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])


def unsorted(x: Tensor) -> Tensor:
    """Sorted and put back: each rank's own order does not matter."""
    rows = x.flatten(0, 1)
    order = rows.detach()[:, 0].argsort()
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return (2 * rows[order])[back].view_as(x)


# What is done to the residual stream. "wrong": where ranks have slices.
HOWS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "where": ("wrong", lambda x: torch.where(places(x)[:, None] < FIRST, x, x / 2)),
    "floor": ("wrong", lambda x: x * (1 + column(x, torch.log1p(torch.floor((places(x) + 1.0) / FIRST))))),
    "clamp": ("wrong", lambda x: x * (1 + column(x, places(x).clamp(min=FIRST) - FIRST) / 8)),
    "bins": ("wrong", lambda x: x * (1 + column(x, torch.bucketize(places(x), torch.tensor([FIRST, 90]))))),
    "whole": ("wrong", lambda x: x / (1 + column(x, places(x) // FIRST))),
    "relu": ("wrong", lambda x: x * (1 + column(x, F.relu(places(x) - float(FIRST))))),
    "table": ("wrong", lambda x: x * column(x, torch.cat([torch.ones(FIRST), torch.full((200,), 2.0)])[: x.shape[1]])),
    "summed": ("wrong", lambda x: torch.where(torch.ones(x.shape[:2]).cumsum(1)[..., None] <= FIRST, x, x / 2)),
    "counted": ("wrong", lambda x: torch.where((x[..., :1] > 0).cumsum(1) <= FIRST // 3, x, x / 2)),
    "counted_rows": (
        "wrong",
        lambda x: torch.where((x.flatten(0, 1)[:, :1] > 0).cumsum(0).view(*x.shape[:2], 1) <= FIRST, x, x / 2),
    ),
    "equal": ("wrong", lambda x: torch.where(places(x)[:, None] == FIRST + 1, x, x / 2)),
    "among": ("wrong", lambda x: torch.where(torch.isin(places(x), torch.tensor([FIRST + 1, 90]))[:, None], x, x / 2)),
    "gather": ("right", lambda x: x[:, places(x)]),
    "parity": ("right", lambda x: torch.where(places(x)[:, None] % 2 == 0, x, x / 2)),
    "ones": ("right", lambda x: x * torch.ones(x.shape[1], 1)),
    "unsorted": ("right", unsorted),
}


class Placed(MlpBlock):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(HOWS[self.how][1](x))


class PlacedBlock(Block):
    """The same between attention and an MLP."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = HOWS[self.how][1](x + self.attn(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


class Windows(Attention):
    """Each head has a wider window than the one before it."""

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        q, k, v = (self.heads(part(x)) for part in (self.q, self.k, self.v))
        apart = places(x)[:, None] - places(x)
        widths = 24 * torch.arange(1, q.shape[1] + 1)
        mask = (apart >= 0) & (apart < widths[:, None, None])
        return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(-2))


class FirstHead(Attention):
    """The first head has a window; the others, or all where that is said, do not differ."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        q, k, v = (self.heads(part(x)) for part in (self.q, self.k, self.v))
        apart = places(x)[:, None] - places(x)
        near, mask = apart < 24, (apart >= 0).repeat(q.shape[1], 1, 1)
        if self.how == "written":
            mask[0] &= near
        if self.how == "all":
            mask &= near
        if self.how == "stacked":
            mask = torch.stack([mask[0] & near, *mask[1:]])
        bias = torch.zeros(mask.shape).masked_fill(~mask, -1e4)
        if self.how == "bias":
            bias[0] += torch.where(near, 0.0, -1e4)
        if self.how == "filled":
            bias[0].masked_fill_(apart >= 24, -1e4)
        return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(-2))


def layers(block: Any, how: str) -> nn.Module:
    return Stack(block(how), block(how))


def first_head(how: str) -> nn.Module:
    return Stack(Block(FirstHead(how)), Block(FirstHead(how)))


def windows() -> nn.Module:
    return Stack(Block(Windows()), Block(Windows()))


def of(name: str, build: Any, given: Any, verdict: Any, **more: Any) -> Adversary:
    return Adversary(
        f"places_{name}", build, longer, given, verdict, "a rank counts its own from 0", seeds=RARE, **more
    )


CASES = (
    *(
        of(
            f"{how}/sequence",
            partial(layers, Placed, how),
            document(MLP, MLP_SEQUENCE),
            verdict,
            sequence_parallel=True,
        )
        for how, (verdict, _) in HOWS.items()
    ),
    *(
        of(f"{how}/cp", partial(layers, PlacedBlock, how), plan(WHOLE), verdict, mesh=MESHES["cp"])
        for how, (verdict, _) in HOWS.items()
    ),
    *(of(f"{how}/whole", partial(layers, Placed, how), document(MLP), "right") for how in ("where", "table")),
    *(
        of(f"first_head_{how}/split", partial(first_head, how), document({**ATTENTION, **MLP}), verdict)
        for how, verdict in (
            ("written", "wrong"),
            ("stacked", "wrong"),
            ("bias", "wrong"),
            ("filled", "wrong"),
            ("all", "right"),
        )
    ),
    of("first_head_written/cp", partial(first_head, "written"), plan(EXCHANGED), "wrong", mesh=MESHES["cp"]),
    of("first_head_written/whole", partial(first_head, "written"), document(MLP), "right"),
    of("windows/split", windows, document({**ATTENTION, **MLP}), "wrong"),
    of("windows/cp", windows, plan(EXCHANGED), "wrong", mesh=MESHES["cp"]),
    of("windows/whole", windows, document(MLP), "right"),
)
