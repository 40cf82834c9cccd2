"""The number of stages, and the blocks and the rank of each."""

from __future__ import annotations

import warnings

from shardplan.compiler.pipeline_cut import even_sizes, pipeline_cut
from shardplan.core.plan import ResolvedPlan
from shardplan.core.schedules import Schedule
from shardplan.core.size_bounds import MOST_RANKS, check_count
from shardplan.core.stages import PipelineCut
from shardplan.runtime.apply.plan_mesh import PlanMesh

from .pipelined_model import Layout


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
            `sizes` has another number of stages.
    """
    assert mesh.pp is not None  # `read_pipeline` refused it
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
    """The number of blocks of each stage: the section's `sizes`, else as even as possible.

    Args:
        micro_batches: None: twice the number of stages, which every schedule can run.

    Raises:
        ValueError: as in `lay_out`.
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
    """The rank of each stage, on a mesh with a pp axis."""
    assert mesh.pp is not None
    owners = {stage: stage % mesh.pp.size() for stage in range(cut.stages)}
    rank = mesh.pp.get_local_rank()
    return Layout(mesh, cut, schedule, owners, tuple(stage for stage, owner in owners.items() if owner == rank))
