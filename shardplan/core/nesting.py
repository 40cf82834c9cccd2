"""The order in which the moves of several axes run at one module.

A sequence is split over cp first, and each slice over tp: tp's slices are the finer ones. So whoever makes slices splits over cp and then
over tp, and whoever gathers them gathers over tp and then over cp. In the other order tokens are at other places, and no shape tells.
"""

from __future__ import annotations

from typing import Literal

from .layout import Layout

When = Literal["before", "after"]  # a move over cp, and the moves of the same value over tp

# (kind of source, kind of destination) of a move over cp -> when it runs.
NESTING: dict[tuple[str, str], When] = {
    ("R", "V"): "before",  # split: at the model's entrance, and where a mixer is left
    ("V", "R"): "after",  # gathered: where a mixer is entered, and behind the last block
}
LAST = -1  # the dim of features


def when(src: Layout, dst: Layout) -> When:
    """When a move over cp runs."""
    if src.kind == dst.kind == "V":  # a mixer is entered and left
        return "after" if dst.dim == LAST else "before"
    return NESTING[src.kind, dst.kind]
