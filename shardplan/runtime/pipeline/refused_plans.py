"""Plans that a schedule cannot run: refused before the model is touched. What the plan leaves open is set as stages need it."""

from __future__ import annotations

from dataclasses import replace

from shardplan.compiler.lower.program import Program
from shardplan.core.schedules import Schedule
from shardplan.core.sections import DataParallel
from shardplan.styles.backends import BACKENDS

ARGUMENTS = "<arguments>"  # the file of what a call's arguments say


def for_stages(program: Program, schedule: Schedule, *, wrapped: bool) -> Program:
    """The program, with gathered parameters kept between micro-batches where the plan leaves it open.

    Args:
        wrapped: whether the mesh has ranks that the data-parallel backend works over.

    Raises:
        ValueError: the plan has no section `pipeline_parallel`, or the schedule does not work with what it says; names the
            field.
    """
    resolved = program.resolved
    if resolved.pipeline_parallel is None or not resolved.pp_blocks:
        raise ValueError(
            f"plan {resolved.plan.name!r} has no section pipeline_parallel: add one, or pass "
            'pipeline_parallel={"layers": "model.layers.*"}'
        )
    if schedule.splits_backward and resolved.compile is not None:
        raise ValueError(
            f"the schedule {schedule.name} computes gradients of inputs and of weights apart, which compiled modules do not "
            "support (https://github.com/pytorch/pytorch/issues/161904): pass compile=False, or use 1f1b or interleaved"
        )
    section = resolved.data_parallel
    if section is None or not wrapped:
        return program
    _check_backend(section, schedule)
    if not BACKENDS[section.backend].fully_shard or _chosen(section):
        return program
    kept = replace(section, reshard_after_forward=False)
    return Program(replace(resolved, data_parallel=kept), program.variants)


def _chosen(section: DataParallel) -> bool:
    """Whether somebody chose when FSDP2 reshards: with an argument, or by another value than plans for any mesh have."""
    place = section.given.get("reshard_after_forward")
    default = DataParallel().reshard_after_forward
    return place is not None and (place.file == ARGUMENTS or section.reshard_after_forward != default)


def _check_backend(section: DataParallel, schedule: Schedule) -> None:
    backend = BACKENDS[section.backend]
    if not backend.stages:
        raise ValueError(f"pipeline stages do not work with the backend {backend.name}: use `backend: fsdp2`")
    if not schedule.splits_backward:
        return
    if not backend.fully_shard:
        raise ValueError(
            f"the schedule {schedule.name} computes gradients without autograd's hooks, so that {backend.name} would not "
            "reduce them (https://github.com/pytorch/pytorch/issues/144530): use `backend: fsdp2`, or 1f1b or interleaved"
        )
    if _chosen(section) and section.reshard_after_forward is not False:
        raise ValueError(
            f"the schedule {schedule.name} computes wrong gradients, without an error, where FSDP2 reshards after forward "
            f"(torch 2.13): data_parallel.reshard_after_forward is {section.reshard_after_forward!r}, and must be false"
        )
