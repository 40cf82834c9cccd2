"""Checkpoints: packed rows are in the original order outside, in the packed order (which depends on tp) inside; loaded
tensors may be whole, or split over another mesh."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from shardplan.compiler.lower.program import Program
from shardplan.core.module_program import ParameterProgram
from shardplan.core.tree import full_name, parent
from shardplan.torchlib.gathering import full_tensor

from .slices import Packing, gathered, in_original_order, like, splits

_PORTABLE = "_shardplan_portable"


def to_original(value: DTensor, packed: Packing, tp: int) -> DTensor:
    """The DTensor with its rows in the original order, still sharded over the same mesh axes. A collective."""
    if value.is_meta:
        return value
    full = in_original_order(gathered(value), packed, tp)
    placements = [Shard(p.dim) if splits(p) else Replicate() for p in value.placements]
    return distribute_tensor(full, value.device_mesh, placements, src_data_rank=None)


def to_stored(value: Tensor, stored: Tensor, packed: Packing | None) -> Tensor:
    """Place a tensor with rows in the original order (a DTensor of any mesh, or whole on every rank) like `stored`: a DTensor, or
    whole on every rank (DDP)."""
    if value.shape != stored.shape:
        return value  # torch's own message about the sizes names the parameter
    if packed is None and _fits(value, stored):
        return value
    whole = full_tensor(value) if isinstance(value, DTensor) else value
    return like(whole, stored, packed) if isinstance(stored, DTensor) else whole


def _fits(value: Tensor, stored: Tensor) -> bool:
    if not isinstance(value, DTensor) or not isinstance(stored, DTensor):
        return False
    return value.device_mesh == stored.device_mesh and value.placements == stored.placements


def packed_parameters(program: Program) -> dict[str, Packing]:
    """The packed parameters of a program by full name."""
    return {
        full_name(name, parameter.name): _packing(parameter)
        for name, module in program.modules.items()
        for parameter in module.parameters
        if parameter.parts
    }


def _packing(parameter: ParameterProgram) -> Packing:
    assert parameter.dim is not None, parameter.name  # the dim that has parts
    return Packing(parameter.dim, parameter.parts)


def keep_original_order(model: nn.Module, packed: Mapping[str, Packing], tp: int) -> None:
    """Make state_dict write packed parameters with their rows in the original order."""
    for name, one in packed.items():
        owner = model.get_submodule(parent(name))
        owner.register_state_dict_post_hook(_save_hook(name.rpartition(".")[2], one, tp))


def _save_hook(leaf: str, packed: Packing, tp: int) -> Any:
    def save(module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
        key = prefix + leaf
        if key in state_dict:
            state_dict[key] = to_original(state_dict[key], packed, tp)

    return save


def load_any_layout(model: nn.Module, packed: Mapping[str, Packing]) -> None:
    """Make load_state_dict accept whole tensors, and DTensors of other meshes (a collective on theirs)."""
    note_before_broadcasts(model, packed)
    for name, module in model.named_modules():
        own = {leaf: packed.get(f"{name}.{leaf}" if name else leaf) for leaf in module._parameters}
        if own:
            module.register_load_state_dict_pre_hook(_load_hook(own))


def _load_hook(own: Mapping[str, Packing | None]) -> Any:
    def load(module: nn.Module, state_dict: dict, prefix: str, *rest: Any) -> None:
        for leaf, packed in own.items():
            stored, value = module._parameters[leaf], state_dict.get(prefix + leaf)
            if not isinstance(stored, DTensor) or not isinstance(value, Tensor):
                continue
            given = value if packed is None else as_loaded(module, leaf, value)
            if given is not None:
                state_dict[prefix + leaf] = to_stored(given, stored, packed)

    return load


def keep_optimizer_order(optimizer: Optimizer, packings: Mapping[int, Packing], tp: int) -> None:
    """Make the optimizer's state_dict and load_state_dict also use the original order of rows, and accept the same
    layouts as the model's. Further calls change nothing.

    Args:
        packings: parameter id -> its packing.
    """
    if optimizer.__dict__.setdefault(_PORTABLE, False):
        return
    optimizer.__dict__[_PORTABLE] = True
    optimized = [p for group in optimizer.param_groups for p in group["params"]]

    def save_one(value: Tensor, parameter: Tensor, packed: Packing | None) -> Tensor:
        if packed is None:
            return value
        assert isinstance(value, DTensor)  # it has a parameter's shape and placements
        return to_original(value, packed, tp)

    def change(state_dict: dict, convert: Callable[[Tensor, Any, Packing | None], Tensor]) -> dict:
        # torch.distributed.checkpoint numbers parameters by name, an optimizer itself by position.
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = dict(zip(keys, optimized, strict=False))  # torch's own message reports different numbers

        def one(key: Any, value: Any) -> Any:
            parameter = parameters.get(key)
            if parameter is None or not isinstance(value, Tensor) or value.shape != parameter.shape:
                return value
            return convert(value, parameter, packings.get(id(parameter)))

        changed = {
            key: {name: one(key, value) for name, value in entries.items()}
            for key, entries in state_dict["state"].items()
        }
        return {**state_dict, "state": changed}

    def save(_: Optimizer, state_dict: dict) -> dict:
        return change(state_dict, save_one)

    def load(_: Optimizer, state_dict: dict) -> dict:
        return change(state_dict, to_stored)

    optimizer.register_state_dict_post_hook(save)
    optimizer.register_load_state_dict_pre_hook(load)


# `set_model_state_dict(..., broadcast_from_rank0=True)` on packed parameters.
#
# torch.distributed.checkpoint writes a rank's rows of the whole tensor, in the original order, into the parameter itself, and passes that
# to `load_state_dict`. But a parameter that the state on rank 0 did not have, or that a script passes unchanged, is in the stored order.
# Only the write shows which of the two it is. Before it writes, torch asks the parameter's module for its `_fqn_modifiers` (the default
# of `StateDictOptions.dsd_fqn_modifiers`); the state is noted at that moment.
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
