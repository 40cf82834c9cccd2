"""Means over features that are spread over the ranks."""

from __future__ import annotations

from shardplan.core.module_program import FeatureMeans, ParameterProgram
from shardplan.core.plan import ResolvedPlan
from shardplan.styles.bound import BoundModule


def feature_means(plan: ResolvedPlan, one: BoundModule) -> FeatureMeans:
    """The number of features that the ranks of a mean have together; each counts once per rank that has it."""
    copies = max((n for p in one.parameters if p.shared for n in gathered_from(plan, p)), default=1)
    assert one.width is not None, one.name  # its style splits a weight
    features = one.width * copies * one.mean_ranks // (plan.sizes.tp or 1)
    return FeatureMeans(features, one.mean_ranks, one.grouped)


def gathered_from(plan: ResolvedPlan, parameter: ParameterProgram) -> set[int]:
    """The number of ranks from which pieces of a parameter are gathered."""
    return {copies for _, copies in parameter.pieces(plan.sizes.tp or 1, 0)} - {1}
