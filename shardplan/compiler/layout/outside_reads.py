"""Results of modules in a block that code outside of the block reads, as an auxiliary loss reads a router's logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest

from shardplan.core.plan import ResolvedPlan
from shardplan.core.tree import ancestors, block, element
from shardplan.model.reduced.trace import Trace

from .finding import Finding
from .repairs import Repair, change, choices, reads_outside, ruled


def outside_repairs(plan: ResolvedPlan, finding: Finding, run: Trace) -> Iterator[Repair]:
    """Changes to try if the model returns values with partial gradients, or combines such values outside of its
    blocks. Each adds a rule with `read_outside` to a module that has no rule and is around one that the values come from.

    Args:
        run: the unsharded one.
    """
    outside = finding.kind == "meeting" and not element(block(finding.module))
    if not outside and finding.kind != "output":
        return
    origins = zip_longest(*(operand.from_modules for operand in finding.operands))
    for origin in dict.fromkeys(name for row in origins for name in row if name is not None):
        limit = block(origin)
        for name in ancestors(origin):
            if name == limit or not name:
                break
            if name not in plan.assignments and plan.tree.modules[name].kind == "other":
                yield from _repairs(plan, name, _read_outside(run, name, limit))


def _repairs(plan: ResolvedPlan, name: str, positions: tuple[int, ...]) -> Iterator[Repair]:
    if positions:
        for style, output in choices("other", overlaid=False):
            if style is not None and output is None and reads_outside(style):
                rule = replace(ruled(style, None, None), read_outside=positions)
                yield change(plan, name, None, rule, "tensor_parallel")


def _read_outside(run: Trace, module: str, limit: str) -> tuple[int, ...]:
    """The positions of a module's results that an operation outside of its block reads or the model returns."""
    read = {
        number
        for event in run.events
        if (event.kind == "op" and block(event.module) != limit) or (event.kind == "leave" and not event.module)
        for number in event.inputs
    }
    called = next((e for e in run.events if e.kind == "leave" and e.module == module), None)
    named = () if called is None else zip(called.names, called.inputs, strict=True)
    return tuple(int(name) for name, number in named if number in read and name.isdecimal())
