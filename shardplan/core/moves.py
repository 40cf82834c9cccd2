"""The one primitive: a move of a value from one layout to another, and what it costs.

A move's backward reads the gradient in the layout that the destination's readers produce and returns it in the layout
of the source's gradient. Two layouts therefore define a move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .layout import Layout

Operation = Literal["identity", "all_reduce", "all_gather", "reduce_scatter", "slice", "pad", "divide"]


@dataclass(frozen=True, slots=True)
class MoveOps:
    """What a move does to the value and to its gradient."""

    forward: Operation
    backward: Operation


SHARED = "V/r"  # a V whose slices are each on r neighbouring ranks, over which its collectives run

# (kind of source, kind of destination) -> what happens. A pair that is not here is not a move.
MOVES: dict[tuple[str, str], MoveOps] = {
    ("I", "R"): MoveOps("identity", "all_reduce"),
    ("I", "V"): MoveOps("slice", "all_gather"),
    ("I", "P"): MoveOps("divide", "identity"),  # 1/n of the value on each of n ranks sums to the value
    ("R", "I"): MoveOps("identity", "divide"),  # a reader outside: its gradient is complete, 1/n of it is a summand
    ("R", "V"): MoveOps("slice", "pad"),
    ("R", "P"): MoveOps("divide", "divide"),
    ("V", "R"): MoveOps("all_gather", "reduce_scatter"),
    ("V", "I"): MoveOps("all_gather", "slice"),
    ("V", SHARED): MoveOps("all_gather", "reduce_scatter"),
    ("P", "I"): MoveOps("all_reduce", "identity"),
    ("P", "R"): MoveOps("all_reduce", "all_reduce"),
    ("P", "V"): MoveOps("reduce_scatter", "all_gather"),
}


def move_ops(src: Layout, dst: Layout) -> MoveOps | None:
    """What moving `src` to `dst` does, on the axis of both; None where there is no such move."""
    assert src.axis is dst.axis, (src, dst)
    if src == dst:
        return MoveOps("identity", "identity")
    if src.kind == dst.kind == "V" and src.dim != dst.dim:
        return None
    return MOVES.get((_word(src), _word(dst)))


def _word(layout: Layout) -> str:
    return SHARED if layout.copies > 1 else layout.kind
