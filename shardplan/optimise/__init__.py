"""Passes over a bound plan that leave its numbers as they are and save communication."""

from __future__ import annotations

from collections.abc import Callable

from shardplan.core.plan import ResolvedPlan
from shardplan.layout import LayoutReport

from .doors import merge_doors
from .sums import merge_sums

Pass = Callable[[ResolvedPlan, LayoutReport], ResolvedPlan]

PASSES: tuple[Pass, ...] = (merge_doors, merge_sums)


def optimise(plan: ResolvedPlan, report: LayoutReport) -> ResolvedPlan:
    """Run every pass.

    Args:
        plan: free of errors.
        report: of its layout check, for this plan's tree.
    """
    for one in PASSES:
        plan = one(plan, report)
    return plan


__all__ = ["PASSES", "Pass", "optimise"]
