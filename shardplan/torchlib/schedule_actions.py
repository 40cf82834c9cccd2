"""The actions of each rank in a pipeline schedule: the tables of torch's own classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.distributed.pipelining.schedules import get_schedule_class

from shardplan.core.schedules import Action, ActionKind, ActionTable, Schedule

KINDS: dict[str, ActionKind] = {
    "F": "forward",
    "B": "backward",
    "I": "backward of inputs",
    "W": "backward of weights",
}


def actions_of(schedule: Schedule, pp: int, micro_batches: int, stages_per_rank: int | None = None) -> ActionTable:
    """What each rank of the pp axis does, in order.

    Raises:
        ValueError: the schedule cannot run so many micro-batches on so many ranks and stages (`Schedule.misfit`).
    """
    if (why := schedule.misfit(pp, micro_batches, stages_per_rank)) is not None:
        raise ValueError(why)
    if schedule.name == "1f1b":
        return tuple(_one_forward_one_backward(rank, pp, micro_batches) for rank in range(pp))
    count = stages_per_rank or schedule.stages_per_rank
    # Its constructor reads these of a stage: no process group is needed for the table.
    stages = [
        SimpleNamespace(
            group_size=pp,
            group_rank=0,
            num_stages=pp * count,
            stage_index=stage,
            submod=torch.nn.Identity(),
            is_first=stage == 0,
            is_last=stage == pp * count - 1,
        )
        for stage in schedule.stages_of(0, pp, count)
    ]
    make = cast(Any, get_schedule_class(schedule.torch_class))
    made = make(stages if schedule.multiple else stages[0], n_microbatches=micro_batches, loss_fn=lambda out, to: out)
    return tuple(tuple(_actions(made.pipeline_order[rank])) for rank in range(pp))


def _one_forward_one_backward(rank: int, pp: int, micro_batches: int) -> tuple[Action, ...]:
    """The order in which torch's Schedule1F1B runs. Its own table (torch 2.13) has the last rank's forwards one too far."""
    ahead = min(micro_batches, pp - rank)
    made = [Action("forward", rank, i) for i in range(ahead)]
    for i in range(micro_batches):
        made.append(Action("backward", rank, i))
        if ahead + i < micro_batches:
            made.append(Action("forward", rank, ahead + i))
    return tuple(made)


def _actions(row: list[Any]) -> list[Action]:
    """Torch's actions as ours: without the steps in which a rank waits; a forward beside a backward is one after the other."""
    found = []
    for one in row:
        parts = [] if one is None else one.sub_actions or (one,)
        found += [
            Action(KINDS[part.computation_type.value], part.stage_index, part.microbatch_index)
            for part in parts
            if part.computation_type.value in KINDS
        ]
    return found
