"""Checks of the options of an estimate."""

from __future__ import annotations

from dataclasses import replace

from shardplan.core.estimates import TrainingStep
from shardplan.core.mesh import MeshSizes


def modelled(sizes: MeshSizes) -> MeshSizes:
    """The sizes, with tp 1 where it is not given.

    Raises:
        ValueError: an ep that does not fit the other axes.
    """
    sizes.check_ep()
    return replace(sizes, tp=sizes.tp or 1)


def check_load(step: TrainingStep, ep: int) -> None:
    """Raise ValueError for a load of experts that a rank cannot have with this ep."""
    if step.expert_load > ep:
        raise ValueError(
            f"expert_load is {step.expert_load:g}, but ep is {ep}: the busiest rank has all rows at {ep} times the mean"
        )
