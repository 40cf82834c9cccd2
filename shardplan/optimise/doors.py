"""The doors that a plan leaves out: readers of one value, each with its own reduction, get one between them.

`colwise` rules of q, k and v, without a rule for the attention module around them, reduce the gradient of the same value
three times. Summing is linear: the sum of the three partial gradients, reduced once, is the same (Megatron-LM's operator f
stands once in front of a block, arXiv 1909.08053).
"""

from __future__ import annotations

from dataclasses import replace

from shardplan.core.diagnostics import Location
from shardplan.core.layout import R
from shardplan.core.plan import Assignment, ResolvedPlan, Rule
from shardplan.layout import LayoutReport
from shardplan.layout.reads import SharedRead

DOOR = "input_with_grad_allreduce"
DOOR_BEHIND = "output_with_grad_allreduce"
ADDED = Location("<merged doors>")


def merge_doors(plan: ResolvedPlan, report: LayoutReport) -> ResolvedPlan:
    """Give each value that several modules move I -> R one door: around them, or behind the module that makes it."""
    reads = [read for read in report.reads if read.module not in plan.assignments]
    if not reads:
        return plan
    inside = {reader for read in reads for reader in read.readers}
    merged = {read.module: _rule(plan, read.module, _door(read)) for read in reads}
    opened = {name: _rule(plan, name, _without_door(plan.assignments[name].rule)) for name in inside}
    assignments = {**plan.assignments, **opened, **merged}
    order = (*plan.tree.modules, *plan.tree.parameters)
    return replace(
        plan,
        assignments={name: assignments[name] for name in order if name in assignments},
        arrivals={**report.arrivals, **dict.fromkeys(sorted(inside), R)},
    )


def _rule(plan: ResolvedPlan, name: str, rule: Rule) -> Assignment:
    return Assignment(name, False, rule, "tensor_parallel")


def _door(read: SharedRead) -> Rule:
    style = DOOR if read.argument is not None else DOOR_BEHIND
    return Rule(pattern=read.module, style=style, location=ADDED, argument=read.argument)


def _without_door(rule: Rule) -> Rule:
    """A reader's rule once its value arrives as R: a door has nothing left to do but to reduce its output."""
    if rule.style != DOOR:
        return rule
    return replace(rule, style=rule.output or "replicate", output=None, argument=None)
