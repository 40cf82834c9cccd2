"""The order in which the moves of several axes run at one module.

A sequence is split over cp first, and each slice over tp: tp's slices are the finer ones. So splitting goes over cp,
then over tp; gathering goes over tp, then over cp. In the other order tokens are at other places, and no shape shows it.
"""

from __future__ import annotations

from typing import Literal

from .layout import Layout

When = Literal["before", "after"]  # a move over cp, and the moves of the same value over tp

# (kind of source, kind of destination) of a move over cp -> when it runs.
NESTING: dict[tuple[str, str], When] = {
    ("R", "V"): "before",  # split: at the model's entrance, and at a mixer's exit
    ("V", "R"): "after",  # gathered: at a mixer's entrance, and after the last block
}
LAST = -1  # the dim of features


def when(src: Layout, dst: Layout) -> When:
    """When a move over cp runs."""
    if src.kind == dst.kind == "V":  # a mixer's entrance and exit
        return "after" if dst.dim == LAST else "before"
    return NESTING[src.kind, dst.kind]
