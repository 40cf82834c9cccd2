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

DOOR = "input_with_grad_allreduce"
ADDED = Location("<merged doors>")


def merge_doors(plan: ResolvedPlan, report: LayoutReport) -> ResolvedPlan:
    """Give each value that several modules move I -> R one door around them."""
    doors = {
        read.module: Assignment(
            read.module,
            False,
            Rule(pattern=read.module, style=DOOR, location=ADDED, argument=read.argument),
            "tensor_parallel",
        )
        for read in report.reads
        if read.module not in plan.assignments
    }
    if not doors:
        return plan
    inside = {reader for read in report.reads if read.module in doors for reader in read.readers}
    order = (*plan.tree.modules, *plan.tree.parameters)
    assignments = {**plan.assignments, **doors}
    return replace(
        plan,
        assignments={name: assignments[name] for name in order if name in assignments},
        arrivals={**report.arrivals, **dict.fromkeys(sorted(inside), R)},
    )
