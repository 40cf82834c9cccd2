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


# No name of a part stands in a text of its own: then the file might read it by this name.
NAMES = {*"norm_cross other".split()}
LINES = {*"other up down".split()}


def off(module: nn.Module) -> frozenset[str]:
    return switched_off(module, module)


def test_flags_decide() -> None:
    parts = {name for name, _ in Flagged().named_children()}
    assert off(Flagged()) & parts == NAMES
    assert off(Flagged(extra=nn.Identity())) & parts == NAMES - LINES, "the shape may decide too"
    assert off(Flagged(cross=True)) & parts == LINES
    assert not off(nn.TransformerEncoderLayer(8, 2)), "torch's code is not read"


def test_a_file_without_source_may_read_everything() -> None:
    unread = type("Unread", (nn.Module,), {"__module__": "a notebook"})
    assert not switched_off(Flagged(), nn.Sequential(Flagged(), unread()))


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
    assert [code for code, _ in found] == ["SP421", "SP421"] and ".other." in found[0][1]


class Crossing(Without):
    """With the other value of the flag."""

    def __init__(self) -> None:
        super().__init__()
        self.cross = True


def test_flags_are_those_of_the_live_model() -> None:
    found = codes(Crossing, RULES)
    assert {code for code, _ in found} == {"SP421"} and any(".up." in message for _, message in found)
