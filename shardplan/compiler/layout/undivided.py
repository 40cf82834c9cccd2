"""What `shares` should name where the solver sees no matrices, as no gradient reaches them (a part of a model that another one trained): the
numbers of a module by which its code reshapes what a plan splits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from torch import nn

from shardplan.core.plan import ResolvedPlan, Rule
from shardplan.core.search_bounds import BOUNDS
from shardplan.core.shares import Share
from shardplan.core.tree import ModuleInfo, is_count
from shardplan.model.forward_code import forward_reads
from shardplan.styles import STYLES
from shardplan.styles.divided_numbers import CONFIG
from shardplan.styles.head_counts import HEAD_SIZES

from .finding import Finding
from .repairs import OURS, Repair, change

KINDS = ("crash", "slices", "untyped")


def dividing_repairs(plan: ResolvedPlan, finding: Finding, model: nn.Module) -> Iterator[Repair]:
    """Changes to try if a module's code fails on slices. They divide one or two of the numbers that it reads.

    Args:
        model: the reduced model, for the code.
    """
    module = plan.tree.modules.get(finding.module)
    if finding.kind not in KINDS or module is None or not _splits(plan, module.name):
        return
    declared = plan.assignments[module.name].rule.divided if module.name in plan.assignments else ()
    own, configured = (
        [name for name in names if name not in declared][: BOUNDS.undivided_numbers]
        for names in _read_counts(module, model.get_submodule(module.name), plan.sizes.tp or 1)
    )
    for divided in (*((name,) for name in own), *combinations(own, 2), *((name,) for name in configured)):
        yield _dividing(plan, module.name, divided)


def _dividing(plan: ResolvedPlan, module: str, divided: tuple[str, ...]) -> Repair:
    """The change that divides further numbers of a module: in its rule or, if it has none, in a new rule."""
    around = plan.assignments.get(module)
    old = around.rule if around is not None else None
    base = old if old is not None else Rule("", "replicate", OURS)
    kept = (one for one in base.shares if one.name not in divided)
    new = replace(base, shares=(*kept, *map(Share, divided)), location=OURS)
    return change(plan, module, old, new, around.section if around is not None else "tensor_parallel")


def _splits(plan: ResolvedPlan, module: str) -> bool:
    """Whether parameters of a module, or of modules below it, are split."""
    return any(
        STYLES[assignment.rule.style].shards_parameters
        for name, assignment in plan.assignments.items()
        if name == module or name.startswith(f"{module}.")
    )


def _read_counts(module: ModuleInfo, layer: nn.Module, tp: int) -> tuple[list[str], list[str]]:
    """The module's own numbers that its code reads and tp divides, and those of its configuration. Left out: sizes of a
    head, and numbers of layers, as each rank runs all layers."""
    reads = forward_reads(type(layer))
    layers = {len(child) for child in layer.children() if isinstance(child, nn.ModuleList)}
    own, config = (
        [
            n
            for n, value in numbers.items()
            if n in reads and is_count(value) and value > 1 and value % tp == 0 and value not in layers
        ]
        for numbers in (module.numbers, module.config or {})
    )
    configured = [f"{CONFIG}{name}" for name in config if name not in HEAD_SIZES] if "config" in reads else []
    return [name for name in own if name not in HEAD_SIZES], configured
