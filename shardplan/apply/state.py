"""Checkpoints of packed parameters: rows in the original order outside, in the packed order (it depends on tp) inside."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from shardplan.core.program import ParameterProgram
from shardplan.lower.program import Program
from shardplan.torchlib.packing import unpack

from .slices import like


def to_original(value: DTensor, parameter: ParameterProgram, tp: int) -> DTensor:
    """The DTensor with its rows in the original order, still sharded over the same mesh axes. A collective."""
    if value.is_meta:
        return value
    full = unpack(value.full_tensor(), parameter.dim, parameter.parts, tp)
    placements = [Replicate() if p.is_replicate() else Shard(p.dim) for p in value.placements]
    return distribute_tensor(full, value.device_mesh, placements, src_data_rank=None)


def to_packed(value: Tensor, stored: DTensor, parameter: ParameterProgram) -> Tensor:
    """A tensor with rows in the original order (a DTensor, or whole on every rank) as `stored` is stored."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    if whole.shape != stored.shape:
        return value  # torch's own message about the sizes names the parameter
    return like(whole, stored, parameter)


def packed_parameters(program: Program) -> dict[str, ParameterProgram]:
    """The packed parameters of a program by full name."""
    return {
        f"{name}.{parameter.name}" if name else parameter.name: parameter
        for name, module in program.modules.items()
        for parameter in module.parameters
        if parameter.parts
    }


def keep_original_order(model: nn.Module, program: Program) -> bool:
    """Make state_dict and load_state_dict speak the original order of rows. Returns whether any parameter is packed."""
    tp = program.resolved.sizes.tp
    packed = packed_parameters(program)
    for full_name, parameter in packed.items():
        owner = model.get_submodule(full_name.rpartition(".")[0])
        owner.register_state_dict_post_hook(_save_hook(parameter, tp))
        owner.register_load_state_dict_pre_hook(_load_hook(parameter))
    return bool(packed)


def _save_hook(parameter: ParameterProgram, tp: int) -> Any:
    def save(module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
        key = prefix + parameter.name
        if key in state_dict:
            state_dict[key] = to_original(state_dict[key], parameter, tp)

    return save


def _load_hook(parameter: ParameterProgram) -> Any:
    def load(module: nn.Module, state_dict: dict, prefix: str, *rest: Any) -> None:
        key = prefix + parameter.name
        if key in state_dict:
            state_dict[key] = to_packed(state_dict[key], module._parameters[parameter.name], parameter)

    return load


def keep_optimizer_order(optimizer: Optimizer, model: nn.Module, program: Program) -> None:
    """Make the optimizer's state_dict and load_state_dict speak the original order of rows too."""
    tp, packed = program.resolved.sizes.tp, packed_parameters(program)
    programs = {id(p): packed[name] for name, p in model.named_parameters() if name in packed}
    held = [p for group in optimizer.param_groups for p in group["params"]]

    def change(state: dict, convert: Any) -> dict:
        result = {}
        for index, entries in state.items():
            parameter = held[index]
            program = programs.get(id(parameter))
            result[index] = {
                name: convert(value, parameter, program)
                if program and isinstance(value, Tensor) and value.shape == parameter.shape
                else value
                for name, value in entries.items()
            }
        return result

    def save(_: Optimizer, state_dict: dict) -> dict:
        convert = lambda value, parameter, program: to_original(value, program, tp)  # noqa: E731
        return {**state_dict, "state": change(state_dict["state"], convert)}

    def load(_: Optimizer, state_dict: dict) -> dict:
        convert = lambda value, parameter, program: to_packed(value, parameter, program)  # noqa: E731
        return {**state_dict, "state": change(state_dict["state"], convert)}

    optimizer.register_state_dict_post_hook(save)
    optimizer.register_load_state_dict_pre_hook(load)
