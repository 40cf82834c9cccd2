"""The options of an estimate, checked."""

from __future__ import annotations

from dataclasses import replace
from typing import TypedDict

from shardplan.core.estimates import OptimizerName, Precision, TrainingStep
from shardplan.core.mesh import MeshSizes


class StepOptions(TypedDict, total=False):
    """The fields of a `TrainingStep` as keyword arguments."""

    seq_len: int
    micro_batch: int
    precision: Precision
    optimizer: OptimizerName
    expert_load: float
    micro_batches: int
    schedule: str


def modelled(sizes: MeshSizes) -> MeshSizes:
    """The sizes, with tp 1 where it is not given.

    Raises:
        ValueError: an ep that the other axes do not have.
    """
    sizes.check_ep()
    return replace(sizes, tp=sizes.tp or 1)


def step_of(step: TrainingStep | None, options: StepOptions) -> TrainingStep:
    """What a function was called with, as one record.

    Raises:
        TypeError: neither or both are given.
    """
    if step is not None and options:
        raise TypeError(f"{', '.join(options)}: put it into the TrainingStep, do not pass both")
    if step is None and "seq_len" not in options:
        raise TypeError("an estimate needs seq_len, the number of tokens in a sequence")
    return step or TrainingStep(**options)


def check_load(step: TrainingStep, ep: int) -> None:
    """Raise ValueError for a load of experts that none of so many ranks can have."""
    if step.expert_load > ep:
        raise ValueError(
            f"expert_load is {step.expert_load:g}, but ep is {ep}: the busiest rank has all rows at {ep} times the mean"
        )
