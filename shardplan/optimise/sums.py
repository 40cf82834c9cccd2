"""Partial sums that a block adds up are reduced together: parallel residuals, x + attention(norm(x)) + mlp(norm(x)).

Summing over ranks and adding commute. What is reduced first hands on zeros instead and waits for the last one, so that the
code in between is the model's own (one reduction for both parts: GPT-J's block, as Megatron-LM runs it).
"""

from __future__ import annotations

from dataclasses import replace

from shardplan.core.plan import ResolvedPlan
from shardplan.core.tree import ModuleTree
from shardplan.layout import LayoutReport
from shardplan.layout.sums import SharedSum


def merge_sums(plan: ResolvedPlan, report: LayoutReport) -> ResolvedPlan:
    """Let the partial sums that are added to each other be reduced by one collective."""
    sums = {carrier: one.closer for one in report.sums if _unchanged(plan.tree, one) for carrier in one.carriers}
    return replace(plan, sums=sums) if sums else plan


def _unchanged(tree: ModuleTree, one: SharedSum) -> bool:
    """Whether what the values pass in between hands them on as they are in the model itself: dropouts that drop nothing,
    which the small copy has switched off."""
    return all(tree.modules[name].kind == "dropout" and not tree.modules[name].numbers.get("p") for name in one.through)
