"""The sequence-parallel entrance of a plan, and the modules at its ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from shardplan.core.layout import I, P
from shardplan.core.plan import ResolvedPlan
from shardplan.core.tree import ancestors

from . import STYLES

Link = Literal["source", "block_input", "scope"]


def links(plan: ResolvedPlan) -> Mapping[str, Link]:
    """The parts of the entrance, by module: embeddings that stay partial, the block input, the module around both.

    An embedding outputs its partial sum only inside a forward of the module around both.
    """
    block_inputs = [n for n, a in plan.modules.items() if {I, P} <= {*STYLES[a.rule.style].input_sources}]
    if not block_inputs:
        return {}
    sources = [n for n, a in plan.modules.items() if STYLES[a.rule.style].until_block_input]
    inner = [*block_inputs, *sources]
    scope = next(
        a
        for a in ancestors(block_inputs[0])
        if plan.tree.modules[a].kind != "list" and all(a in ancestors(other) for other in inner)
    )
    return {**dict.fromkeys(sources, "source"), **dict.fromkeys(block_inputs, "block_input"), scope: "scope"}
