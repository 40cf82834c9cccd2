"""Results of modules in a block that code outside of the block reads, as an auxiliary loss reads a router's logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from shardplan.core.plan import ResolvedPlan
from shardplan.core.tree import ancestors, block, element
from shardplan.model.reduced.trace import Trace

from .finding import Finding
from .repairs import Repair, change, choices, origins, reads_outside, ruled


def outside_repairs(plan: ResolvedPlan, finding: Finding, run: Trace) -> Iterator[Repair]:
    """Changes to try if the model returns values with partial gradients, or combines such values outside of its
    blocks. Each adds a rule with `read_outside` to a module that has no rule and is around one that the values come from.

    Args:
        run: the unsharded one.
    """
    outside = finding.kind == "meeting" and not element(block(finding.module))
    if not outside and finding.kind != "output":
        return
    read = read_outside(run)
    for origin in origins(finding):
        limit = block(origin)
        for name in ancestors(origin):
            if name == limit or not name:
                break
            if name not in plan.assignments and plan.tree.modules[name].kind == "other":
                yield from _repairs(plan, name, tuple(sorted(read.get(name, ()))))


def _repairs(plan: ResolvedPlan, name: str, positions: tuple[int, ...]) -> Iterator[Repair]:
    for style, output in choices("other", overlaid=False) if positions else ():
        if style is not None and output is None and reads_outside(style):
            rule = replace(ruled(style, None, None), read_outside=positions)
            yield change(plan, name, None, rule, "tensor_parallel")


def read_outside(run: Trace) -> Mapping[str, frozenset[int]]:
    """Module in a block -> the positions of its results that code outside of the blocks reads, or that the model returns, after each of its
    calls."""
    outer = (
        e
        for e in run.events
        if (e.kind == "op" and not element(block(e.module))) or (e.kind == "leave" and not e.module)
    )
    read, found = {number for event in outer for number in event.inputs}, dict[str, frozenset[int]]()
    for event in run.events:
        if event.kind == "leave" and element(block(event.module)) and event.module != block(event.module):
            named = zip(event.names, event.inputs, strict=True)
            positions = frozenset(int(name) for name, number in named if number in read and name.isdecimal())
            found[event.module] = found.get(event.module, positions) & positions
    return found
