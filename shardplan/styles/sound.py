"""Whether a record is complete and possible. `shardplan.styles` checks each record when it is imported."""

from __future__ import annotations

from shardplan.core.layout import P, V
from shardplan.core.moves import move_ops

from .style_record import Style


def missing(style: Style) -> str | None:
    """What a record lacks, or None."""
    for src in style.input_sources:
        if style.input_destination is None:
            return "has input sources, but no input destination"
        if move_ops(src, style.input_destination) is None:
            return f"there is no move from its input source {src} to its input destination {style.input_destination}"
    output_destination = P if style.until_block_input and style.output_source == P else style.output_destination
    if output_destination is not None:
        if style.output_source is None:
            return f"has the output destination {output_destination}, but no output source"
        if move_ops(style.output_source, output_destination) is None:
            return f"there is no move from its output source {style.output_source} to its output destination {output_destination}"
    if style.shards_parameters and style.output_source is None:
        return "splits parameters, but has no output source"
    if style.features.means and not (style.input_destination == style.output_source == V(-1)):
        return "takes means over split features, but its features are not split"
    if style.splits_rows and style.output_source != P:
        return "looks rows up by id, but does not compute a partial sum"
    return None
