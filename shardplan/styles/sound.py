"""Whether a record says enough, and nothing impossible, for its layouts to be proven. `shardplan.styles` asks when it
is imported."""

from __future__ import annotations

from shardplan.core.layout import P, V
from shardplan.core.moves import move_ops

from .style_record import Style


def missing(style: Style) -> str | None:
    """What a record lacks, or None."""
    for src in style.input_sources:
        if style.input_destination is None:
            return "takes a layout, but does not say what the module's forward gets"
        if move_ops(src, style.input_destination) is None:
            return f"takes {src} and gives {style.input_destination}, which is no move"
    output_destination = P if style.until_block_input and style.output_source == P else style.output_destination
    if output_destination is not None:
        if style.output_source is None:
            return f"hands on {output_destination}, but does not say what the module computes"
        if move_ops(style.output_source, output_destination) is None:
            return f"computes {style.output_source} and hands on {output_destination}, which is no move"
    if style.shards_parameters and style.output_source is None:
        return "splits parameters, but does not say what the module then computes"
    if style.features.means and not (style.input_destination == style.output_source == V(-1)):
        return "takes means over split features, but its features are not split"
    if style.splits_rows and style.output_source != P:
        return "looks rows up by id, but does not compute a partial sum"
    return None
