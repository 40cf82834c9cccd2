"""Parameters: stored as DTensors on the tp mesh, read as local tensors while a module's own forward runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardplan.core.layout import I, P
from shardplan.core.program import ParameterProgram

from .moves import move, sum_gradients
from .packing import pack
from .regime import Regime

Gradient = Literal["shard", "complete", "partial", "divided"]


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a parameter of an adapted layer, and its name there (`lora_A.default.weight`)."""
    path, _, leaf = name.rpartition(".")
    return (module.get_submodule(path) if path else module), leaf


def distribute(module: nn.Module, parameter: ParameterProgram, mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """Replace a parameter of the module by a DTensor Parameter; frozen stays frozen.

    Args:
        src_data_rank: the tp rank whose values count; None: every rank's own (no communication).
    """
    owner, leaf = owner_of(module, parameter.name)
    old = owner._parameters[leaf]
    assert old is not None and not isinstance(old, DTensor), parameter.name
    data = old.detach()
    if parameter.parts:
        data = pack(data, parameter.dim, parameter.parts, mesh.size())
    placement = Replicate() if parameter.dim is None else Shard(parameter.dim)
    new = nn.Parameter(
        distribute_tensor(data, mesh, [placement], src_data_rank=src_data_rank), requires_grad=old.requires_grad
    )
    new.__dict__.update(old.__dict__)  # libraries mark parameters with attributes
    owner.register_parameter(leaf, new)


def to_local(parameter: Tensor | None, gradient: Gradient, regime: Regime) -> Tensor | None:
    """The local tensor of a DTensor parameter, or this rank's part of it where it is divided; a partial gradient is summed
    over tp before it reaches the DTensor.

    What is no DTensor (already read by an enclosing block) is returned as it is.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if gradient == "shard":
        return parameter.to_local(grad_placements=parameter.placements)
    local = parameter.to_local(grad_placements=[Replicate()])
    if gradient == "partial" and local.requires_grad:
        (local,) = sum_gradients(parameter.device_mesh, [local], regime.reduce_dtype)
    return move(local, parameter.device_mesh, I, P) if gradient == "divided" else local


class LocalParameters:
    """Around a module's forward: its DTensor parameters are local tensors, its withheld ones None or zeros.

    They are exchanged in `_parameters`, not set as attributes, so that getattr (FSDP2, weight tying) finds the
    Parameter, and put back on exceptions too (the early stop of activation checkpointing passes through here). Those of an
    adapted layer are exchanged together, as the adapter's code reads what the layer holds.
    """

    def __init__(
        self,
        gradients: Mapping[bool, Mapping[str, Gradient]],
        regime: Regime,
        withheld: Mapping[str, Literal["none", "zeros"]],
    ):
        self.gradients = gradients
        self.regime = regime
        self.withheld = dict(withheld)

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        stored: list[tuple[dict[str, Any], str, Tensor | None]] = []
        try:
            for name, gradient in self.gradients[self.regime.sequence_parallel].items():
                owner, leaf = owner_of(module, name)
                parameters = owner._parameters
                stored.append((parameters, leaf, parameters[leaf]))
                if name in self.withheld:
                    parameters[leaf] = self._stand_in(parameters[leaf], self.withheld[name])
                else:
                    parameters[leaf] = to_local(parameters[leaf], gradient, self.regime)
            return forward(*args, **kwargs)
        finally:
            for parameters, leaf, parameter in stored:
                parameters[leaf] = parameter

    @staticmethod
    def _stand_in(parameter: Tensor | None, what: Literal["none", "zeros"]) -> Tensor | None:
        if parameter is None or what == "none":
            return None
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return torch.zeros_like(local, requires_grad=False)


def _read(
    names: tuple[tuple[nn.Module, str], ...],
) -> tuple[list[tuple[nn.Module, str, DTensor]], list[Tensor]]:
    """The trained DTensors among the named parameters and their local tensors. (A loop: torch.compile traces it inside a
    checkpoint, where it cannot trace a comprehension that closes over something.)"""
    members, locals_ = [], []
    for owner, name in names:
        parameter = owner._parameters[name]
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            members.append((owner, name, parameter))
            locals_.append(parameter.to_local(grad_placements=[Replicate()]))
    return members, locals_


def _call_with(
    forward: Callable[..., Any],
    members: list[tuple[nn.Module, str, Tensor | None]],
    locals_: Iterable[Tensor | None],
    args: tuple,
    kwargs: dict,
) -> Any:
    """Call with other modules' parameters exchanged for local tensors."""
    try:
        for (owner, name, _), local in zip(members, locals_, strict=True):
            owner._parameters[name] = local
        return forward(*args, **kwargs)
    finally:
        for owner, name, parameter in members:
            owner._parameters[name] = parameter


class ParametersBelow:
    """Around a forward that reads parameters of modules below it: they are local tensors in it too."""

    def __init__(self, members: Mapping[bool, tuple[tuple[nn.Module, str, Gradient], ...]], regime: Regime):
        self.members = members
        self.regime = regime

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        members, locals_ = [], []
        for owner, name, gradient in self.members[self.regime.sequence_parallel]:
            parameter = owner._parameters[name]
            members.append((owner, name, parameter))
            locals_.append(to_local(parameter, gradient, self.regime))
        return _call_with(forward, members, locals_, args, kwargs)


class GroupedGradients:
    """Around a block's forward: its small whole parameters with partial gradients are read together, through one
    autograd node whose backward is one all-reduce."""

    def __init__(self, members: Mapping[bool, tuple[tuple[nn.Module, str], ...]], regime: Regime):
        self.members = members
        self.regime = regime

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        members, locals_ = _read(self.members[self.regime.sequence_parallel])
        if not members or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        summed = sum_gradients(members[0][2].device_mesh, locals_, self.regime.reduce_dtype)
        return _call_with(forward, members, summed, args, kwargs)
