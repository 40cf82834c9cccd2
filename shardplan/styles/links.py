"""The sequence-parallel entrance of a plan: which modules hold its ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from shardplan.core.layout import P
from shardplan.core.plan import ResolvedPlan
from shardplan.core.tree import ancestors

from . import STYLES

Link = Literal["source", "door", "scope"]


def links(plan: ResolvedPlan) -> Mapping[str, Link]:
    """The parts of the entrance, by module: embeddings that stay partial, the door, the module around both.

    An embedding hands its partial sum on only inside a forward of the module around both.
    """
    doors = [n for n, a in plan.modules.items() if P in STYLES[a.rule.style].takes]
    if not doors:
        return {}
    sources = [n for n, a in plan.modules.items() if STYLES[a.rule.style].until_door]
    inner = [*doors, *sources]
    scope = next(
        a
        for a in ancestors(doors[0])
        if plan.tree.modules[a].kind != "list" and all(a in ancestors(other) for other in inner)
    )
    return {**dict.fromkeys(sources, "source"), **dict.fromkeys(doors, "door"), scope: "scope"}
