"""Plans that pipeline stages cannot run: refused before the model is touched. An option that the plan leaves open gets its value for stages."""

from __future__ import annotations

from dataclasses import replace

from shardplan.compiler.lower.program import Program
from shardplan.core.sections import DataParallel
from shardplan.styles.backends import BACKENDS

ARGUMENTS = "<arguments>"  # the "file" of a call's arguments


def for_stages(program: Program, *, wrapped: bool) -> Program:
    """The program; it keeps gathered parameters between micro-batches, unless the plan says otherwise.

    Args:
        wrapped: whether the mesh has ranks that the data-parallel backend works over.

    Raises:
        ValueError: the plan has no section `pipeline_parallel`, or a backend that does not support stages.
    """
    resolved = program.resolved
    if resolved.pipeline_parallel is None or not resolved.pp_blocks:
        raise ValueError(
            f"plan {resolved.plan.name!r} has no section pipeline_parallel: add one, or pass "
            'pipeline_parallel={"layers": "model.layers.*"}'
        )
    section = resolved.data_parallel
    if section is None or not wrapped:
        return program
    backend = BACKENDS[section.backend]
    if not backend.stages:
        raise ValueError(f"pipeline stages do not work with the backend {backend.name}: use `backend: fsdp2`")
    if not backend.fully_shard or _chosen(section):
        return program
    kept = replace(section, reshard_after_forward=False)
    return Program(replace(resolved, data_parallel=kept), program.variants)


def _chosen(section: DataParallel) -> bool:
    """Whether somebody chose when FSDP2 reshards: with an argument, or by a value other than the one in plans for any mesh."""
    place = section.given.get("reshard_after_forward")
    default = DataParallel().reshard_after_forward
    return place is not None and (place.file == ARGUMENTS or section.reshard_after_forward != default)
