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
    if not report.reads:
        return plan
    inside = {reader for read in report.reads for reader in read.readers}
    opened = {name: _without_door(plan.assignments[name].rule) for name in inside}
    merged = {read.module: _door(read, plan.assignments.get(read.module)) for read in report.reads}
    added = {name: Assignment(name, False, rule, "tensor_parallel") for name, rule in {**opened, **merged}.items()}
    assignments = {**plan.assignments, **added}
    order = (*plan.tree.modules, *plan.tree.parameters)
    return replace(
        plan,
        assignments={name: assignments[name] for name in order if name in assignments},
        arrivals={**report.arrivals, **dict.fromkeys(sorted(inside), R)},
    )


def _door(read: SharedRead, own: Assignment | None) -> Rule:
    """With what the module's own rule says beside its style, which moves nothing."""
    rule = own.rule if own is not None else Rule(pattern=read.module, style=DOOR, location=ADDED)
    return replace(rule, style=DOOR if read.argument is not None else DOOR_BEHIND, argument=read.argument)


def _without_door(rule: Rule) -> Rule:
    """A reader's rule once its value arrives as R: a door has nothing left to do but to reduce its output."""
    if rule.style != DOOR:
        return rule
    return replace(rule, style=rule.output or "replicate", output=None, argument=None)
