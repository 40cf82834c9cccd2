"""`set_model_state_dict(..., broadcast_from_rank0=True)` on packed parameters.

torch.distributed.checkpoint writes a rank's rows of the whole tensor, in the original order, into the parameter itself, and passes
that to `load_state_dict`. But a parameter that the state on rank 0 did not have, or that a script passes unchanged, is in the stored
order. Only the write shows which of the two it is. Before it writes, torch asks the parameter's module for its `_fqn_modifiers` (the default
of `StateDictOptions.dsd_fqn_modifiers`); the state is noted at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardplan.core.tree import parent

_ASKED, _NOTED = "_fqn_modifiers", "_shardplan_before_broadcast"


def note_before_broadcasts(model: nn.Module, names: Collection[str]) -> None:
    """Make the modules of packed parameters note the parameters' state just before torch writes into them.

    Args:
        names: the packed parameters.
    """
    for name in names:
        owner, leaf = model.get_submodule(parent(name)), name.rpartition(".")[2]
        owner.__dict__[_ASKED] = partial(_note, owner, leaf, getattr(owner, _ASKED, dict))


def _note(owner: nn.Module, leaf: str, asked: Callable[[], Mapping[str, str]]) -> Mapping[str, str]:
    parameter = owner._parameters[leaf]
    if isinstance(parameter, DTensor):
        owner.__dict__.setdefault(_NOTED, {})[leaf] = parameter, _writes(parameter)
    return asked()


def _writes(parameter: DTensor) -> int:
    """The number of writes to the rank's part."""
    with torch.no_grad():
        return parameter.to_local()._version


def as_loaded(owner: nn.Module, leaf: str, value: Tensor) -> Tensor | None:
    """A value passed to `load_state_dict` for a packed parameter, with rows in the original order: a new object if torch wrote
    into the parameter itself; None if the parameter was passed unchanged."""
    parameter, before = owner.__dict__.get(_NOTED, {}).pop(leaf, (None, 0))
    if parameter is not value:
        return value
    assert isinstance(parameter, DTensor), leaf
    return None if _writes(parameter) == before else value.detach()
