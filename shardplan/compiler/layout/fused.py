"""Matrices whose result the code cuts into equal parts by a number of its module (q, k and v in one): the changes that
split them, and the line of the model's code that must change where no rule helps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations

from shardplan.core.plan import ResolvedPlan, Rule
from shardplan.core.tree import ModuleInfo, starred
from shardplan.styles import STYLES, feature_dim
from shardplan.styles.head_counts import HEAD_SIZES

from .finding import Finding
from .repairs import OURS, Repair, change
from .undivided import dividing

PACKED = "packed_colwise"
WIDEST = 6  # parts
MOST_ATTRIBUTES = 4  # to try, besides the width
SHAPING = ("view", "reshape", "unflatten", "expand", "split")
KINDS = ("crash", "slices")


def fused_repairs(plan: ResolvedPlan, finding: Finding) -> Iterator[Repair]:
    """Changes to try where a module's code fails on the result of a matrix below it: pack the matrix, and divide the
    numbers by which the code cuts."""
    module = plan.tree.modules.get(finding.module)
    if finding.kind not in KINDS or module is None:
        return
    tp = plan.sizes.tp or 1
    numbers = {n: v for n, v in module.numbers.items() if n not in HEAD_SIZES}  # heads are split, never inside
    counts = {n: v for n, v in numbers.items() if type(v) is int and v > 1 and v % tp == 0}
    tried: list[tuple[str, int, tuple[str, ...]]] = []
    for child in _fused_children(plan, module):
        features = _out_features(child)
        for width in (n for n, v in counts.items() if features % v == 0 and 1 < features // v <= WIDEST):
            parts = features // counts[width]
            others = [n for n, v in counts.items() if n != width and counts[width] % v == 0][:MOST_ATTRIBUTES]
            for more in chain(((),), ((n,) for n in others), combinations(others, 2)):
                tried.append((child.name, parts, (width, *more)))
    for name, parts, divided in sorted(tried, key=lambda one: len(one[2])):  # the fewest numbers first
        yield _both(plan, module.name, name, parts, divided)


def advice(plan: ResolvedPlan, finding: Finding) -> str | None:
    """What to change in the model's code, where it gives a slice the shape of the whole; else None."""
    module = plan.tree.modules.get(finding.module)
    if finding.kind not in KINDS or module is None or finding.source is None:
        return None
    if not any(word in finding.source.text for word in SHAPING):
        return None
    fused = [child for child in _fused_children(plan, module) if _splits(plan, child.name)]
    if not fused:
        return None
    return (
        f"change {finding.source.short} in {starred(module.name)}: it reshapes a rank's slice as if it were the whole. "
        "Write -1 for the split dim: `.view(B, T, -1, C // self.n_head)` for the heads, where the size of a head comes from "
        "the whole width, and `.view(B, T, -1)` where they are joined; and cut by a number that `shares` names"
    )


def _both(plan: ResolvedPlan, module: str, child: str, parts: int, divided: tuple[str, ...]) -> Repair:
    """The matrix packed, where it is not, and the numbers of the module divided."""
    numbers = dividing(plan, module, divided)
    matrix = plan.assignments.get(child)
    rule = matrix.rule if matrix is not None else None
    if rule is not None and rule.style == PACKED and (rule.packed or 2) == parts:
        return numbers
    packed = Rule("", PACKED, OURS, packed=parts, shares=rule.shares if rule is not None else ())
    first = change(plan, child, rule, packed, matrix.section if matrix is not None else "tensor_parallel")
    return replace(first, also=numbers)


def _fused_children(plan: ResolvedPlan, module: ModuleInfo) -> Iterator[ModuleInfo]:
    """The matrices right below a module that are split by their output features or not at all."""
    for name in plan.tree.children[module.name]:
        child = plan.tree.modules[name]
        if child.kind not in ("linear", "conv1d") or child.parameter("weight") is None:
            continue
        rule = plan.assignments[name].rule if name in plan.assignments else None
        if rule is None or STYLES[rule.style].weight.shard != "in":
            yield child


def _splits(plan: ResolvedPlan, name: str) -> bool:
    return name in plan.assignments and STYLES[plan.assignments[name].rule.style].weight.shard == "out"


def _out_features(module: ModuleInfo) -> int:
    weight = module.parameter("weight")
    assert weight is not None
    dim = feature_dim(module.kind, weight.name, "out", len(weight.shape))
    assert dim is not None
    return weight.shape[dim]
