"""The one primitive: a move of a value from one layout to another, and its cost.

A move's backward reads the gradient in the layout that the destination's readers produce and returns it in the layout
of the source's gradient. Two layouts therefore define a move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .layout import Layout

Operation = Literal["identity", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "slice", "pad", "divide"]
Ranges = tuple[tuple[int, int], ...]  # of a dim: (start, length), in the order on a rank


@dataclass(frozen=True, slots=True)
class MoveOps:
    """The effect of a move on the value and on its gradient."""

    forward: Operation
    backward: Operation


SHARED = "V/r"  # a V with each slice on r neighbouring ranks; its collectives run over them
OTHER = "V(e)"  # a V of another dim than the source's
OTHER_SHARED = "V(e)/r"

# (kind of source, kind of destination) -> the operations. A pair that is missing is not a move.
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
    ("V", OTHER): MoveOps("all_to_all", "all_to_all"),
    ("V", OTHER_SHARED): MoveOps(
        "all_to_all", "all_to_all"
    ),  # backward adds the gradients of the r ranks that have a slice
    ("P", "I"): MoveOps("all_reduce", "identity"),
    ("P", "R"): MoveOps("all_reduce", "all_reduce"),
    ("P", "V"): MoveOps("reduce_scatter", "all_gather"),
}


def move_ops(src: Layout, dst: Layout) -> MoveOps | None:
    """The operations that move `src` to `dst`, on the axis of both; None if there is no such move."""
    assert src.axis is dst.axis, (src, dst)
    if src == dst:
        return MoveOps("identity", "identity")
    word = dst.kind if dst.copies == 1 else SHARED
    if src.kind == dst.kind == "V" and src.dim != dst.dim:
        word = OTHER if dst.copies == 1 else OTHER_SHARED
    return MOVES.get((src.kind if src.copies == 1 else SHARED, word))


def ranges_of(layout: Layout, size: int, ranks: int) -> tuple[Ranges, ...]:
    """The ranges that each rank has of the dim that a V splits, in ceil-chunks.

    Args:
        layout: a V.
        size: the length of the whole dim.
        ranks: the size of the axis.
    """
    assert layout.kind == "V" and ranks % layout.copies == 0, layout
    chunk = -(-size * layout.copies // ranks)
    starts = [min(rank // layout.copies * chunk, size) for rank in range(ranks)]
    return tuple(((start, min(chunk, size - start)),) for start in starts)


def length_of(ranges: Ranges) -> int:
    """Their total length."""
    return sum(length for _, length in ranges)


def covered(shares: Sequence[Ranges]) -> int:
    """The length of the whole dim that all ranks' ranges cover."""
    return max(start + length for ranges in shares for start, length in ranges)
