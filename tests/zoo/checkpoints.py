"""What `auto` does with the published checkpoints of one model type."""

from __future__ import annotations

from dataclasses import replace

from tests.variants.outcome import outcome
from tests.variants.published import checkpoints

from .entry import Entry


def with_checkpoints(before: Entry) -> Entry:
    """The entry of a type with what was found out about its published checkpoints."""
    found = [
        outcome(one.model_type, one.name, one.fields, one.fields)
        for one in checkpoints()
        if one.model_type == before.name
    ]
    words = {"tensor_parallel": "TP", "sequence_parallel": "SP"}
    return replace(
        before, checkpoints={one.name: ", ".join(words[v] for v in one.variants) or one.about for one in found}
    )
