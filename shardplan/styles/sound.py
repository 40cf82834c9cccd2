"""Whether a record says enough, and nothing impossible, for its layouts to be proven. `shardplan.styles` asks when it
is imported."""

from __future__ import annotations

from shardplan.core.layout import P, V
from shardplan.core.moves import move_ops

from .style_record import Style


def missing(style: Style) -> str | None:
    """What a record lacks, or None."""
    for src in style.takes:
        if style.inside is None:
            return "takes a layout, but does not say what the module's forward gets"
        if move_ops(src, style.inside) is None:
            return f"takes {src} and gives {style.inside}, which is no move"
    hands = P if style.until_door and style.computes == P else style.hands
    if hands is not None:
        if style.computes is None:
            return f"hands on {hands}, but does not say what the module computes"
        if move_ops(style.computes, hands) is None:
            return f"computes {style.computes} and hands on {hands}, which is no move"
    if style.shards_parameters and style.computes is None:
        return "splits parameters, but does not say what the module then computes"
    if style.features.means and not (style.inside == style.computes == V(-1)):
        return "takes means over split features, but its features are not split"
    if style.splits_rows and style.computes != P:
        return "looks rows up by id, but does not compute a partial sum"
    return None
