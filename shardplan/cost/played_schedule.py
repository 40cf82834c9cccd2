"""A pipeline's schedule as a picture: what each rank does when."""

from __future__ import annotations

from collections.abc import Callable

from shardplan.compiler.pipeline_cut import pipeline_cut
from shardplan.core.plan import ResolvedPlan
from shardplan.core.schedules import SCHEDULES
from shardplan.core.stages import PlayedSchedule, Slot
from shardplan.model.found import FoundModel
from shardplan.torchlib.schedule_actions import actions_of

from .pipeline_time import StageTime, play
from .stage_sizes import block_costs, stage_sizes

THIRD = 1 / 3  # of a stage's operations: the forward, and the gradients of its input and of its weights


def played_schedule(
    found: FoundModel,
    resolved: ResolvedPlan,
    schedule: str,
    micro_batches: int | None,
    seq_len: int | None,
    progress: Callable[[str], None] = lambda text: None,
) -> PlayedSchedule:
    """The stages of a plan, and its schedule played with the operations of each.

    Args:
        resolved: a compiled plan's, on a mesh with pp above 1.
        micro_batches: of a step; None: two for each stage.
        seq_len: tokens of a sequence.

    Raises:
        ValueError: the schedule does not work with the micro-batches, the mesh or the number of blocks.
        PlanError: SP560: the model cannot be run without values.
    """
    one, pp = SCHEDULES[schedule], resolved.sizes.pp
    progress("playing the schedule of the pipeline")
    cut = pipeline_cut(resolved, stage_sizes(found, resolved, pp, one, None, seq_len))
    costs = block_costs(found, resolved, seq_len or 4096)
    of_block = dict(zip(cut.blocks, costs.blocks, strict=True))
    work = [sum(of_block[name] for name in cut.blocks_of(stage)) for stage in range(cut.stages)]
    work[0] += costs.first
    work[-1] += costs.last
    times = [StageTime(share * THIRD, share * THIRD, share * THIRD) for share in work]
    count = micro_batches or 2 * cut.stages
    table = actions_of(one, pp, count)
    made = play(table, times)
    ranks = []
    for row, ends in zip(table, made.ends, strict=True):
        spans = ((end - times[action.stage].of(action), end) for action, end in zip(row, ends, strict=True))
        ranks.append(
            tuple(
                Slot(action.kind, action.stage, action.micro_batch, start / made.seconds, end / made.seconds)
                for action, (start, end) in zip(row, spans, strict=True)
            )
        )
    return PlayedSchedule(one.name, count, cut, tuple(ranks), made.bubble)
