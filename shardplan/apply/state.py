"""Checkpoints of packed parameters: rows in the original order outside, in the packed order (it depends on tp) inside."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from shardplan.core.program import ParameterProgram
from shardplan.lower.program import Program
from shardplan.torchlib.packing import pack, unpack


def _local_slice(full: Tensor, like: DTensor) -> Tensor:
    """This rank's part of a whole tensor, cut as `like` is: over tp first, then (strided) over what FSDP added."""
    mesh = like.device_mesh
    cuts = [(axis, placement) for axis, placement in enumerate(like.placements) if isinstance(placement, Shard)]
    strided = [(a, p) for a, p in enumerate(like.placements) if not isinstance(p, Shard) and p.is_shard()]
    local = full
    for axis, placement in (*cuts, *strided):
        chunks = local.chunk(mesh.size(axis), dim=placement.dim)
        rank = mesh.get_local_rank(axis)
        local = chunks[rank] if rank < len(chunks) else local.narrow(placement.dim, 0, 0)
    return local


def to_original(value: DTensor, parameter: ParameterProgram, tp: int) -> DTensor:
    """The DTensor with its rows in the original order, still sharded over the same mesh axes. A collective."""
    if value.is_meta:
        return value
    full = unpack(value.full_tensor(), parameter.dim, parameter.parts, tp)
    placements = [Shard(p.dim) if p.is_shard() else Replicate() for p in value.placements]
    return distribute_tensor(full, value.device_mesh, placements, src_data_rank=None)


def to_packed(value: Tensor, like: DTensor, parameter: ParameterProgram, tp: int) -> DTensor:
    """A tensor with rows in the original order (a DTensor, or whole on every rank) as `like` is stored."""
    full = value.full_tensor() if isinstance(value, DTensor) else value
    if tuple(full.shape) != tuple(like.shape):
        return value  # torch's own size mismatch names the parameter
    packed = pack(full.to(like.device), parameter.dim, parameter.parts, tp)
    local = _local_slice(packed, like).to(like.dtype).contiguous()
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


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
        owner.register_load_state_dict_pre_hook(_load_hook(parameter, tp))
    return bool(packed)


def _save_hook(parameter: ParameterProgram, tp: int) -> Any:
    def save(module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
        key = prefix + parameter.name
        if key in state_dict:
            state_dict[key] = to_original(state_dict[key], parameter, tp)

    return save


def _load_hook(parameter: ParameterProgram, tp: int) -> Any:
    def load(module: nn.Module, state_dict: dict, prefix: str, *rest: Any) -> None:
        key = prefix + parameter.name
        if key in state_dict:
            state_dict[key] = to_packed(state_dict[key], module._parameters[parameter.name], parameter, tp)

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
        convert = lambda value, parameter, program: to_packed(value, parameter, program, tp)  # noqa: E731
        return {**state_dict, "state": change(state_dict["state"], convert)}

    optimizer.register_state_dict_post_hook(save)
    optimizer.register_load_state_dict_pre_hook(load)
