"""Rules for tp below modules whose heads are exchanged over cp: they also say which heads and channels a rank of cp has there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardplan.core.plan import PLAIN, Assignment
from shardplan.core.tree import ModuleTree, ancestors
from shardplan.styles import STYLES

TOLD = ("output", "shares", "fused", "divides")  # options of the module's rule for tp that hold for its heads over cp


def with_heads_below(
    over_cp: Mapping[str, Assignment], over_tp: Mapping[str, Assignment], tree: ModuleTree
) -> dict[str, Assignment]:
    """The assignments for cp, and those for tp that also say what a rank of cp has. The latter keep their section.

    Args:
        over_tp: only the assignments of the section `tensor_parallel`.
    """
    mixers = {name for name, one in over_cp.items() if STYLES[one.rule.style].exchanges_heads}
    found = dict(over_cp)
    for name, one in over_tp.items():
        owner = tree.owner(name) if one.is_parameter else name
        around = (owner, *ancestors(owner))
        if name in mixers:
            own = over_cp[name].rule
            if all(getattr(own, option) == getattr(PLAIN, option) for option in TOLD):  # a check refuses any other rule
                told = replace(own, **{option: getattr(one.rule, option) for option in TOLD})
                found[name] = replace(over_cp[name], rule=told, section=one.section)
        elif mixers.intersection(around):
            found.setdefault(name, one)
    return found
