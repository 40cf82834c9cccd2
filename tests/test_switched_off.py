"""Modules that a constructor makes always, and that the code uses under a flag."""

from __future__ import annotations

from torch import Tensor, nn

import shardplan
from shardplan.model.code_conditions import switched_off
from tests.test_init_idioms import WIDTH, Blocks, hidden


class Flagged(nn.Module):
    """MONAI's block: the norm before the cross attention is there without it too."""

    def __init__(self, cross: bool = False, extra: nn.Module | None = None) -> None:
        super().__init__()
        self.cross, self.extra, self.bound = cross, extra, 0.0
        self.norm, self.norm_cross, self.other = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.rare, self.unnamed, self.evaluated = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.cross:
            x = x + self.norm_cross(x)
        y = self.norm(x)
        if self.extra is not None and (self.cross or x.ndim > 5):
            y = self.other(y)
        elif not self.cross:
            y = self.down(self.up(y).relu())
        y = self.rare(y) if x.abs().max() > 1e6 else y
        return x + (y if self.training else self.evaluated(y))


NAMES = {"norm_cross", "other"}


def test_flags_decide() -> None:
    parts = {name for name, _ in Flagged().named_children()}
    assert switched_off(Flagged()) & parts == NAMES
    assert switched_off(Flagged(extra=nn.Identity())) & parts == {"norm_cross"}, "the shape may decide too"
    assert switched_off(Flagged(cross=True)) & parts == {"other", "up", "down"}
    assert not switched_off(nn.TransformerEncoderLayer(8, 2)), "torch's code is not read"


class Without(Flagged):
    """Without what no flag decides about."""

    def __init__(self) -> None:
        super().__init__()
        del self.rare, self.unnamed, self.evaluated
        self.rare = self.evaluated = nn.Identity()


RULES = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def codes(block: type[nn.Module], rules: dict[str, str]) -> list[tuple[str, str]]:
    plan = {"version": "1", "name": "own", "tensor_parallel": rules}
    report = shardplan.validate(shardplan.Model(Blocks(block), inputs=hidden), plan, {"tp": 2})
    return [(one.code, one.message) for one in report.errors]


def test_a_whole_part_that_is_switched_off_needs_no_proof() -> None:
    assert codes(Without, RULES) == []
    ((code, message),) = codes(Flagged, RULES)
    assert code == "SP421" and all(name in message for name in ("rare", "unnamed", "evaluated"))
    assert not any(name in message for name in NAMES)


def test_a_split_part_needs_one() -> None:
    found = codes(Without, {**RULES, "blocks.*.other.weight": "colwise"})
    assert [code for code, _ in found] == ["SP421", "SP421"] and "other" in found[0][1]


def test_flags_are_those_of_the_live_model() -> None:
    model = Blocks(Without)
    for block in model.blocks:
        block.cross = True
    plan = {"version": "1", "name": "own", "tensor_parallel": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}}
    report = shardplan.validate(shardplan.Model(model, inputs=hidden), plan, {"tp": 2})
    assert {one.code for one in report.errors} == {"SP421"} and any(".up." in one.message for one in report.errors)
