"""Fused matrices (q, k and v in one): the code cuts their result into equal parts by a number of its module. Finds
the changes that split them, and the line of the model's code to change if no rule helps."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations

from shardplan.core.plan import ResolvedPlan, Rule
from shardplan.core.search_bounds import BOUNDS
from shardplan.core.tree import ModuleInfo, starred
from shardplan.model.reduced.trace import SourceLine, Trace
from shardplan.styles import STYLES, feature_dim
from shardplan.styles.head_counts import HEAD_SIZES

from .finding import Finding
from .repairs import OURS, Repair, change
from .undivided import dividing

PACKED = "packed_colwise"
DEFAULT = 2  # parts of a rule without `packed`
EQUAL = (3, 2)  # numbers of parts to try where the code does not cut at once
Packed = int | tuple[str, ...]
# A line that reads the length of the sequence, and perhaps more: `B, T, C = x.shape`, `T = x.size(1)`.
LENGTH = re.compile(r"([\w ,]+?)\s*=\s*(\w+)\.(?:shape(?:\[1\]|\[:2\])?|size\(1?\))")
SHAPING = ("view", "reshape", "unflatten", "expand", "split")
KINDS = ("crash", "slices")


def fused_repairs(plan: ResolvedPlan, finding: Finding, reference: Trace) -> Iterator[Repair]:
    """Changes to try if a module's code fails on the result of a matrix below it. They pack the matrix, and divide
    the numbers by which the code cuts.

    Args:
        reference: the unsharded run of the reduced model.
    """
    module = plan.tree.modules.get(finding.module)
    if finding.kind not in KINDS or module is None:
        return
    tp = plan.sizes.tp or 1
    numbers = {n: v for n, v in module.numbers.items() if n not in HEAD_SIZES}  # heads are split, never inside
    counts = {n: v for n, v in numbers.items() if type(v) is int and v > 1 and v % tp == 0}
    tried: list[tuple[str, Packed, tuple[str, ...]]] = []
    for child in _fused_children(plan, module):
        features = _out_features(child)
        cut = _cut_parts(plan, child, reference)
        if cut is not None:
            tried.append((child.name, cut, ()))
        elif _splits(plan, child.name):
            tried += [(child.name, parts, ()) for parts in EQUAL if features % parts == 0]
        for width in (n for n, v in counts.items() if features % v == 0 and 1 < features // v <= BOUNDS.fused_parts):
            parts = features // counts[width]
            others = [n for n, v in counts.items() if n != width and counts[width] % v == 0][: BOUNDS.fused_numbers]
            for more in chain(((),), ((n,) for n in others), combinations(others, 2)):
                tried.append((child.name, parts, (width, *more)))
    for name, packed, divided in sorted(tried, key=lambda one: len(one[2])):  # the fewest numbers first
        if divided or not _is_packed(plan, name, packed):
            yield _both(plan, module.name, name, packed, divided)


def _is_packed(plan: ResolvedPlan, name: str, parts: Packed) -> bool:
    rule = plan.assignments[name].rule if name in plan.assignments else None
    return rule is not None and rule.style == PACKED and (rule.packed or DEFAULT) == parts


def _cut_parts(plan: ResolvedPlan, child: ModuleInfo, reference: Trace) -> Packed | None:
    """The parts into which the code cuts the result of a matrix directly: their number, or the length of each; None if it does not cut it.

    Lengths are those of the model itself if it has no configuration: it is then its own reduced model.
    """
    made = {event.outputs[0] for event in reference.events if event.kind == "op" and event.module == child.name}
    for event in reference.events:
        if event.kind == "op" and len(event.outputs) > 1 and set(event.inputs) & made:
            lengths = [reference.values[number].shape[-1] for number in event.outputs]
            if sum(lengths) == _out_features(child):
                same = len(set(lengths)) == 1
                return len(lengths) if same else None if plan.tree.numbers else tuple(map(str, lengths))
    return None


def advice(plan: ResolvedPlan, finding: Finding) -> str | None:
    """What to change in code of the model that gives a slice the shape of the whole; None for other code."""
    module = plan.tree.modules.get(finding.module)
    if finding.kind not in KINDS or module is None or finding.source is None:
        return None
    if not any(word in finding.source.text for word in SHAPING):
        return None
    if (length := _length_of_slice(plan, finding.source)) is not None:
        return length
    fused = [child for child in _fused_children(plan, module) if _splits(plan, child.name)]
    if not fused:
        return None
    return (
        f"change {finding.source.short} in {starred(module.name)}: it reshapes a rank's slice as if it were the whole. "
        "Write -1 for the split dim: `.view(B, T, -1, C // self.n_head)` for the heads, where the size of a head comes from "
        "the whole width, and `.view(B, T, -1)` where they are joined; and cut by a number that `shares` names"
    )


def _length_of_slice(plan: ResolvedPlan, source: SourceLine) -> str | None:
    """What to change if a line reshapes by a length of the sequence that the code reads from a rank's slice."""
    lines = linecache.getlines(source.file)[: source.line]
    for number, text in reversed(list(enumerate(lines, 1))) if plan.sequence_parallel else ():
        read = LENGTH.fullmatch(text.strip())
        names = [name.strip() for name in read[1].split(",")] if read else []
        length = names[0] if len(names) == 1 else names[1] if len(names) > 1 else ""
        if read and length.isidentifier() and re.search(rf"\b{length}\b", source.text):
            return (
                f"change `{text.strip()}` (line {number}): `{read[2]}` is a rank's slice of the sequence in front of the norm that "
                f"gathers it. Read {length} from what is gathered, as in `{length} = h.shape[1]` where h is the norm's result"
            )
        if text.lstrip().startswith("def "):
            return None
    return None


def _both(plan: ResolvedPlan, module: str, child: str, parts: Packed, divided: tuple[str, ...]) -> Repair:
    """The change that packs the matrix, if it is not packed, and divides the numbers of the module."""
    numbers = dividing(plan, module, divided)
    matrix = plan.assignments.get(child)
    rule = matrix.rule if matrix is not None else None
    if _is_packed(plan, child, parts):
        return numbers
    packed = Rule(
        "", PACKED, OURS, packed=None if parts == DEFAULT else parts, shares=rule.shares if rule is not None else ()
    )
    first = change(plan, child, rule, packed, matrix.section if matrix is not None else "tensor_parallel")
    return replace(first, also=numbers) if divided else first


def _fused_children(plan: ResolvedPlan, module: ModuleInfo) -> Iterator[ModuleInfo]:
    """The matrices directly below a module that are split by their output features or not split."""
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
