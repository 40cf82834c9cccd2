"""A bound plan, cut into pipeline stages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shardplan.core.plan import ResolvedPlan
from shardplan.core.stages import PipelineCut


def pipeline_cut(resolved: ResolvedPlan, sizes: Iterable[int]) -> PipelineCut:
    """The stages of a plan whose section `pipeline_parallel` is free of errors.

    Args:
        resolved: with all of `pp_first` and `pp_last`: those of a compiled plan (`compile_variant`), on a mesh with pp above 1.
        sizes: how many blocks each stage has, in the order in which a batch runs through the stages; together
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
    """As many blocks for each stage, as far as it divides: the first and the last stage, which have more besides, get fewer.

    Raises:
        ValueError: there are fewer blocks than stages.
    """
    if blocks < stages:
        raise ValueError(f"{blocks} blocks cannot be cut into {stages} stages")
    least, more = divmod(blocks, stages)
    order = [*range(1, stages - 1), 0, stages - 1][:more]  # which stages get one more
    return tuple(least + (stage in order) for stage in range(stages))
