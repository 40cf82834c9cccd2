"""Steps of optimizers while parameters are gathered. A forward without gradients leaves some units of FSDP2 gathered (the outermost one,
the last with `all_but_last`) until the next backward: an optimizer that is made then holds the gathered parameters, and a step changes the
shards alone, while the next forward would compute with what was gathered before it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardplan.core.first_few import in_a_row
from shardplan.runtime.parallel.fsdp_units import groups_in, parameters_of, units_of
from shardplan.torchlib.private import private

from .model_parts import Parted, parts_of

_current_graph_task_id = private("current_graph_task_id")
SHOWN = 3


def step_shards(model: nn.Module | Parted) -> None:
    """Before each step of an optimizer of this model, free what FSDP2 left gathered. A step of gathered parameters raises ValueError.

    torch calls the hook for the optimizers of all models. It is removed when the model is freed.
    """
    units = [
        weakref.ref(unit.module) for unit in units_of(module for part in parts_of(model) for module in part.modules())
    ]
    if not units:
        return
    asked: weakref.WeakKeyDictionary[Optimizer, tuple[set[int], bool]] = weakref.WeakKeyDictionary()

    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        alive = [unit for one in units if (unit := one()) is not None]
        if not alive:
            # torch iterates over its list of hooks here: it is removed after the step.
            optimizer.register_step_post_hook(lambda *_: handle.remove())
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        before, steps_own = asked.get(optimizer, (None, False))
        if held != before:  # a parameter that an optimizer holds does not become a gathered one later
            own = list(parameters_of(groups_in(alive)))
            if gathered := [one.name for one in own if not held.isdisjoint(map(id, one.others))]:
                raise ValueError(_message(gathered, len(held)))
            steps_own = not held.isdisjoint(id(one.shard) for one in own)
            asked[optimizer] = held, steps_own
        # An optimizer may step inside of a backward, from hooks of parameters: what is gathered there is needed.
        if steps_own and _current_graph_task_id() == -1:
            for unit in alive:
                unit.reshard()

    handle = register_optimizer_step_pre_hook(check)


def _message(gathered: list[str], count: int) -> str:
    return (
        f"this optimizer was created after a forward without gradients, which left {len(gathered)} of the {count} parameters that it holds "
        f"gathered ({in_a_row(gathered, SHOWN)}): its steps would not train the model. Create the optimizer before that forward, or call "
        "applied(model).reshard() first"
    )
