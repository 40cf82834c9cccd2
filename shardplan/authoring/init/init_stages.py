"""The section of a plan that cuts a model into pipeline stages, derived from recorded runs of the reduced model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from shardplan.compiler.layout import RecordedModel
from shardplan.compiler.layout.stage_check import blocks_of, derived_parts
from shardplan.core.tree import ModuleTree, parent


def pipeline_section(recorded_models: Sequence[RecordedModel], tree: ModuleTree) -> dict[str, Any] | None:
    """The fields of `pipeline_parallel`: the blocks, the values to carry, and the stage of parts that no run reads. None where
    the runs do not show that the model can be cut.

    Args:
        recorded_models: the reduced model, with each kind of input.
        tree: the tree of the model itself.
    """
    reduced = recorded_models[0].tree
    home = next((parent(name) for name in blocks_of(tree)), None)
    blocks = reduced.children.get(home, ()) if home is not None else ()
    if home is None or len(blocks) < 2 or tree.shared or tree.numbers.get("is_encoder_decoder"):
        return None
    parts, facts = derived_parts(recorded_models, blocks)
    unread = facts.ends.unread
    facts = replace(facts, ends=replace(facts.ends, unread=()))
    if not facts.proven:
        return None
    order = list(reduced.parameters)
    inside = [i for i, name in enumerate(order) if name.startswith(f"{home}.")]
    first = [name for name in unread if order.index(name) < inside[0]]
    found: dict[str, Any] = {"layers": reduced.address(f"{home}.*")}
    for field, names in (
        ("first", first),
        ("last", [name for name in unread if name not in first]),
        ("carry", parts.carried),
    ):
        if patterns := _patterns(reduced, names):
            found[field] = patterns
    return found


def _patterns(tree: ModuleTree, names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(tree.address(tree.pattern(name)) for name in names))
