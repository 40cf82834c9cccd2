"""Which plans exist, and what a plan splits of a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from .plan import Variant
from .tree import ModuleTree, ancestors, block, element, full_name


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a plan splits of a model.

    Args:
        model: its name, as given.
        plan: the plan's name.
        allowed_tp: the sizes of the tp axis that divide all that is split, without and with sequence parallelism.
        split: the share (0 to 1) of the parameters inside the layers that is split over tp.
        whole: pattern of a part of a layer -> its share of the parameters inside the layers. These parts are the
            largest modules that have matrices but split nothing; every rank holds them and computes the same with them.
    """

    model: str
    plan: str
    allowed_tp: Mapping[Variant, tuple[int, ...]]
    split: float
    whole: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ListedPlan:
    """A built-in plan, for one model type.

    Args:
        model: the type, or "(by name)" for a plan that `auto` does not choose.
        sequence_parallel: whether it has such a section.
    """

    model: str
    plan: str
    sequence_parallel: bool
    description: str


@dataclass(frozen=True, slots=True)
class Listing:
    """The built-in plans, by model type."""

    plans: tuple[ListedPlan, ...]


def covered(tree: ModuleTree, split: Collection[str]) -> tuple[float, Mapping[str, float]]:
    """`Coverage.split` and `Coverage.whole`.

    Args:
        split: full names of the parameters that are split.
    """
    inside = {name: one for name, one in tree.parameters.items() if element(block(one[0].name))}
    total = sum(p.numel for _, p in inside.values()) or 1
    touched = {module for name in split for module in ancestors(name)}
    whole: dict[str, int] = {}
    for owner, p in inside.values():
        if full_name(owner.name, p.name) in split or len(p.shape) < 2:
            continue
        around = [m for m in (owner.name, *ancestors(owner.name)) if m not in touched and block(m) == block(owner.name)]
        part = tree.pattern(around[-1] if around else full_name(owner.name, p.name))
        whole[part] = whole.get(part, 0) + p.numel
    share = sum(p.numel for name, (_, p) in inside.items() if name in split) / total
    return share, {part: n / total for part, n in whole.items()}
