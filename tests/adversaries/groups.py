"""Numbers of groups of a norm: right ones, and those that do not fit the norm, its features or the ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .adversary import Adversary, document
from .parts import WIDTH, Stack, features


class GroupedNorm(nn.Module):
    """An RMS norm of each group of features.

    Args:
        reads: the number that its forward reads, "count" of groups or "length" of one; or "both" at once.
    """

    def __init__(self, width: int, groups: int, reads: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.reads, self.count, self.length = reads, groups, width // groups
        if reads != "both":
            delattr(self, "length" if reads == "count" else "count")

    def forward(self, x: Tensor) -> Tensor:
        shape = {"count": lambda: (self.count, -1), "length": lambda: (-1, self.length)}
        sizes = shape[self.reads]() if self.reads in shape else (self.count, self.length)
        x = x.view(*x.shape[:-1], *sizes)
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-2)).flatten(-2)


class Grouped(nn.Module):
    def __init__(self, width: int, groups: int, reads: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)
        self.norm = GroupedNorm(width, groups, reads)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(torch.relu(self.up(x)) * 2))


def model(width: int, groups: int, reads: str) -> nn.Module:
    return Stack(Grouped(width, groups, reads), Grouped(width, groups, reads))


def case(
    name: str, verdict: Any, reads: str, has: int, declared: Any, *, width: int = 32, tp: int = 2, **more: Any
) -> Adversary:
    """A norm that `has` so many groups. `declared`: the plan's number of groups, for what the norm reads; or the plan's shares."""
    names = ("count", "length") if reads == "both" else (reads,)
    shares = declared if isinstance(declared, list) else [{one: {"groups": declared}} for one in names]
    plan = document(
        {
            "layers.*.up": "colwise",
            "layers.*.down": "rowwise",
            "layers.*.norm": {"style": "colwise_norm", "shares": shares},
        }
    )
    why = f"{has} groups of {width} features on {tp} ranks, declared as {declared}"
    build = partial(model, width, has, reads)
    return Adversary(f"groups/{name}", build, features, plan, verdict, why, mesh={"tp": tp}, **more)


REFUSED = {"codes": ("SP313",)}
CASES = (
    *(case(f"{reads}_{has}", "right", reads, has, has) for reads in ("count", "length") for has in (1, 2, 4, 16)),
    *(case(f"{reads}_on_ranks", "right", reads, 2, 2, tp=4) for reads in ("count", "length")),
    case("both", "right", "both", 4, 4),
    case("both_on_ranks", "right", "both", 2, 2, tp=4),
    case("length_of_one", "right", "length", 32, 32),
    # A count and a length that are the same number are divided otherwise: which it is cannot be told, and the finding has both lines.
    *(case(f"alike_{reads}", "refused", reads, 4, 4, width=16, **REFUSED) for reads in ("count", "length", "both")),
    case("alike_as_count", "right", "count", 4, ["count"], width=16),
    *(case(f"alike_on_ranks_{reads}", "right", reads, 2, 2, width=4, tp=4) for reads in ("count", "length", "both")),
    case("other", "wrong", "count", 4, 2, **REFUSED),
    case("other_length", "wrong", "length", 4, 8),
    case("turned", "wrong", "count", 4, 8),
    case("negative", "wrong", "count", 4, "2 - 6", **REFUSED),
    case("zero", "wrong", "count", 4, "4 - 4", **REFUSED),
    case("huge", "wrong", "count", 4, 10**30, codes=("SP105",)),
    case("uneven", "wrong", "length", 4, 3, **REFUSED),
    case("of_ranks", "wrong", "count", 3, 3, width=24),
    case("of_four_ranks", "wrong", "count", 6, 6, width=48, tp=4),
    case("no_features", "wrong", "count", 4, 64, **REFUSED),
    case("fraction", "wrong", "count", 4, "4 / 3", codes=("SP113",)),
    case("unknown", "wrong", "count", 4, "n_groups", **REFUSED),
    case("two_numbers", "wrong", "both", 4, [{"count": {"groups": 4}}, {"length": {"groups": 2}}], **REFUSED),
    case("twice", "wrong", "count", 4, ["count", {"count": {"groups": 4}}], **REFUSED),
    case("divided_as_well", "wrong", "both", 4, ["length", {"count": {"groups": 4}}]),
    case("divided_by_tp", "right", "count", 4, ["count"]),
)
