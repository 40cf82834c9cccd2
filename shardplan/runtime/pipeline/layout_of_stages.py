"""How many stages there are, what each has, and on which rank it is."""

from __future__ import annotations

import warnings

from shardplan.compiler.pipeline_cut import even_sizes, pipeline_cut
from shardplan.core.mesh import Axis
from shardplan.core.plan import ResolvedPlan
from shardplan.core.schedules import Schedule, schedule_of
from shardplan.core.size_bounds import MOST_MICRO_BATCHES, MOST_RANKS, check_count
from shardplan.core.stages import PipelineCut
from shardplan.runtime.apply.plan_mesh import PlanMesh

from .pipelined_model import Layout


def read_call(mesh: PlanMesh, schedule: str, micro_batches: int) -> Schedule:
    """The schedule, if the mesh has stages for it.

    Raises:
        TypeError: the schedule is no name, micro_batches no whole number.
        ValueError: no such schedule; a mesh without an axis pp, or with context parallelism; no micro-batch, or more than any step
            has.
    """
    record = read_schedule(schedule, micro_batches)
    if mesh.pp is None or mesh.pp.size() == 1:
        raise ValueError("the mesh has no axis pp of several ranks, which stages are laid on: call apply_plan")
    if mesh.sizes.of(Axis.CP) > 1:
        raise ValueError("the mesh has the axis cp: pipeline stages do not work with context parallelism yet")
    mesh.within_stage  # noqa: B018  # raises where pp is the only axis
    return record


def read_schedule(schedule: str, micro_batches: int) -> Schedule:
    """The schedule of that name.

    Raises:
        TypeError: the schedule is no name, micro_batches no whole number.
        ValueError: no such schedule; fewer than one micro-batch.
    """
    if not isinstance(micro_batches, int) or isinstance(micro_batches, bool):
        raise TypeError(f"micro_batches must be a whole number, not {micro_batches!r}")
    if micro_batches < 1:
        raise ValueError(f"micro_batches must be at least 1, not {micro_batches}")
    check_count("micro_batches", micro_batches, MOST_MICRO_BATCHES)
    return schedule_of(schedule)


def lay_out(
    mesh: PlanMesh,
    resolved: ResolvedPlan,
    schedule: Schedule,
    stages_per_rank: int | None,
    micro_batches: int,
) -> Layout:
    """The cut of a compiled plan, and the stages of this rank.

    Raises:
        ValueError: the schedule wants another number of stages or of micro-batches; there are fewer blocks than stages;
            `sizes` are those of another number of stages.
    """
    assert mesh.pp is not None  # `read_call` refused it
    sizes = stage_sizes(resolved, schedule, mesh.pp.size(), stages_per_rank, micro_batches)
    if micro_batches < (count := len(sizes)):
        warnings.warn(
            f"{micro_batches} micro-batches for {count} stages: some stages wait all the time; use at least {count}",
            stacklevel=3,
        )
    return layout_on(mesh, pipeline_cut(resolved, sizes), schedule)


def stage_sizes(
    resolved: ResolvedPlan, schedule: Schedule, pp: int, stages_per_rank: int | None, micro_batches: int | None
) -> tuple[int, ...]:
    """How many blocks each stage has: as the section's `sizes` say, or as many for each as far as it divides.

    Args:
        micro_batches: None: twice as many as stages, which every schedule can run.

    Raises:
        ValueError: as `lay_out`.
    """
    section = resolved.pipeline_parallel
    sizes = section.sizes if section is not None else None
    if stages_per_rank is None and sizes is not None and len(sizes) % pp == 0:
        stages_per_rank = len(sizes) // pp
    if stages_per_rank is not None:
        check_count("stages_per_rank", stages_per_rank, MOST_RANKS)
    count = pp * (stages_per_rank or schedule.stages_per_rank)
    if (why := schedule.misfit(pp, micro_batches or 2 * count, stages_per_rank)) is not None:
        raise ValueError(why)
    if sizes is not None and len(sizes) != count:
        raise ValueError(
            f"pipeline_parallel has sizes for {len(sizes)} stages, but the schedule {schedule.name} has {count} on pp {pp}"
        )
    blocks = len(resolved.pp_blocks)
    if blocks < count:
        raise ValueError(
            f"the model has {blocks} blocks, too few for {count} stages (pp {pp}, schedule {schedule.name})"
        )
    return sizes or even_sizes(blocks, count)


def layout_on(mesh: PlanMesh, cut: PipelineCut, schedule: Schedule) -> Layout:
    """Which rank of a mesh with an axis pp has which stage."""
    assert mesh.pp is not None
    owners = {stage: stage % mesh.pp.size() for stage in range(cut.stages)}
    rank = mesh.pp.get_local_rank()
    return Layout(mesh, cut, schedule, owners, tuple(stage for stage, owner in owners.items() if owner == rank))
