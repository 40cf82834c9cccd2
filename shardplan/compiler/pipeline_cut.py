"""A bound plan, cut into pipeline stages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shardplan.core.plan import ResolvedPlan
from shardplan.core.stages import PipelineCut


def pipeline_cut(resolved: ResolvedPlan, sizes: Iterable[int]) -> PipelineCut:
    """The stages of a plan whose section `pipeline_parallel` has no errors.

    Args:
        resolved: a compiled plan (`compile_variant`), with all of `pp_first` and `pp_last`, on a mesh with pp above 1.
        sizes: the number of blocks of each stage, in the order in which a batch runs through the stages; their sum is
            `len(resolved.pp_blocks)`.
    """
    cut = PipelineCut(
        blocks=resolved.pp_blocks,
        sizes=tuple(sizes),
        first=resolved.pp_first,
        last=resolved.pp_last,
        handed=resolved.pp_handed,
        results=resolved.pp_results,
        written=resolved.pp_written,
    )
    ties = tuple(group for group in resolved.tree.tied if len({cut.stage_of(name) for name in group}) > 1)
    return replace(cut, ties=ties)


def even_sizes(blocks: int, stages: int) -> tuple[int, ...]:
    """Equal numbers of blocks for the stages, if possible; the first and last, which hold other modules too, get fewer.

    Raises:
        ValueError: there are fewer blocks than stages.
    """
    if blocks < stages:
        raise ValueError(f"{blocks} blocks cannot be cut into {stages} stages")
    least, more = divmod(blocks, stages)
    order = [*range(1, stages - 1), 0, stages - 1][:more]  # the stages that get one more
    return tuple(least + (stage in order) for stage in range(stages))
