"""Hooks on parameters that FSDP2 shards. Autograd runs the hooks (`register_hook`) of the tensor that gets a gradient: the gathered one.
FSDP2 sets the gradient of the sharded tensor itself, so a hook on that tensor would never run: registering one is refused."""

from __future__ import annotations

from functools import partial
from typing import NoReturn, cast

from torch import Tensor, nn

from shardplan.runtime.parallel.fsdp_units import units_of, when_gathered

from .marked_parameters import mark_parameters


def refuse_later_hooks(model: nn.Module) -> None:
    """Make `register_hook` of the parameters that FSDP2 shards raise RuntimeError; the message says what to write instead."""
    units = units_of(model.modules())
    sharded = {id(p.sharded_param) for unit in units for found in unit.groups for p in found.group.fsdp_params}
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in sharded]
    by_identity = {id(parameter): name for name, parameter in mark_parameters(model, names, _mark).items()}
    # After a forward, the model has the gathered parameters of the root and of units that stay gathered.
    kept = [cast(nn.Module, u.module) for u in units if any(f.after_forward is None for f in u.groups)]
    when_gathered({model, *kept}, lambda parameter: partial(_mark, by_identity[id(parameter)]))


def _mark(name: str, parameter: Tensor) -> None:
    parameter.__dict__["register_hook"] = partial(_refuse, name)


def _refuse(name: str, hook: object) -> NoReturn:
    raise RuntimeError(
        f"register_hook on {name}: FSDP2 sets the gradient of a sharded parameter itself, and the hook would never run. Use "
        "parameter.register_post_accumulate_grad_hook(hook): it is called with the parameter, whose .grad is averaged over the data-parallel "
        "ranks and sharded as the parameter is. Or change .grad between backward and optimizer.step()"
    )
