"""The options of `apply_plan` that only a pipeline needs."""

from __future__ import annotations

from dataclasses import dataclass

from shardplan.core.mesh import Axis
from shardplan.core.schedules import Schedule, schedule_of
from shardplan.core.size_bounds import MOST_MICRO_BATCHES, check_count
from shardplan.runtime.apply.plan_mesh import PlanMesh

from .step_loss import LossFunction


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """How `apply_plan` runs the stages of a pipeline.

    Args:
        schedule: gpipe, 1f1b or interleaved, or the name of torch's class.
        micro_batches: the number of parts of a step's batch, on each data-parallel rank.
        stages_per_rank: for a schedule that works with several numbers; None: from the `sizes` of the plan's section
            `pipeline_parallel`, else the schedule's smallest number.
        loss_fn: (logits, labels) of a micro-batch -> the sum over its tokens, a scalar. None: the model computes its loss.

    Raises:
        TypeError: the schedule is not a name, or micro_batches not a whole number.
        ValueError: no such schedule; micro_batches below 1, or more than any step has.
    """

    schedule: str = "1f1b"
    micro_batches: int = 8
    stages_per_rank: int | None = None
    loss_fn: LossFunction | None = None

    def __post_init__(self) -> None:
        count = self.micro_batches
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"micro_batches must be a whole number, not {count!r}")
        if count < 1:
            raise ValueError(f"micro_batches must be at least 1, not {count}")
        check_count("micro_batches", count, MOST_MICRO_BATCHES)
        schedule_of(self.schedule)

    @property
    def record(self) -> Schedule:
        return schedule_of(self.schedule)


def read_pipeline(options: PipelineOptions | None, mesh: PlanMesh) -> PipelineOptions | None:
    """How stages run on a mesh; None where the mesh has no stages.

    Raises:
        TypeError: the options have another type.
        ValueError: options for a mesh without stages; stages on a mesh with context parallelism, or with pp as its only axis.
    """
    if options is not None and not isinstance(options, PipelineOptions):
        raise TypeError(
            f'pipeline must be a PipelineOptions, as `pipeline=PipelineOptions(schedule="1f1b")`, not {options!r}'
        )
    if mesh.sizes.pp == 1:
        if options is not None:
            raise ValueError(
                "the mesh has no axis pp of several ranks for the stages: leave `pipeline` out, or make the mesh with build_mesh(pp=2, ...)"
            )
        return None
    if mesh.sizes.of(Axis.CP) > 1:
        raise ValueError("the mesh has the axis cp: pipeline stages do not work with context parallelism yet")
    mesh.within_stage  # noqa: B018  # raises where pp is the only axis
    return options or PipelineOptions()
