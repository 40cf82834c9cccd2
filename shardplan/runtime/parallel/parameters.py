"""Parameters: stored as DTensors on the tp or ep mesh, read as local tensors while a module's own forward runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardplan.core.mesh import Axis
from shardplan.core.module_program import ParameterProgram, StandIn
from shardplan.torchlib.attributes import owner_of
from shardplan.torchlib.packing import pack

from .later_weights import leaving
from .reading import Member, Place, call_with, read
from .regime import Regime


def distribute(
    module: nn.Module,
    parameter: ParameterProgram,
    mesh: DeviceMesh,
    src_data_rank: int | None,
    ready: Callable[[], None],
    ep: DeviceMesh | None = None,
) -> None:
    """Replace a parameter of the module by a DTensor Parameter; frozen stays frozen.

    Args:
        mesh: the tp mesh.
        src_data_rank: the tp rank whose values are used; None: every rank's own (no communication).
        ready: called before the values are sent; raises where another rank failed.
        ep: the ep mesh, if the program stores parameters over it.
    """
    owner, leaf = owner_of(module, parameter.name)
    old = owner._parameters[leaf]
    assert old is not None and not isinstance(old, DTensor), parameter.name
    data = old.detach()
    placement: Replicate | Shard = Replicate()
    if parameter.dim is not None:
        placement = Shard(parameter.dim)
        if parameter.parts:
            data = pack(data, parameter.dim, parameter.parts, mesh.size())
    if src_data_rank is not None and not data.is_meta:
        ready()
    if parameter.stored.axis is Axis.EP:
        assert ep is not None and parameter.dim is not None and data.shape[parameter.dim] % ep.size() == 0, (
            parameter.name
        )
        # An ep group may be part of a tp group and lack the source rank, or contain several source ranks.
        data = distribute_tensor(data, mesh, [Replicate()], src_data_rank=src_data_rank).to_local()
        mesh, src_data_rank = ep, None
    new = nn.Parameter(
        distribute_tensor(data, mesh, [placement], src_data_rank=src_data_rank), requires_grad=old.requires_grad
    )
    new.__dict__.update(old.__dict__)  # libraries mark parameters with attributes
    owner.register_parameter(leaf, new)


class LocalParameters:
    """Wraps a module's forward: its DTensor parameters become local tensors, its withheld ones None or zeros.

    They are replaced in `_parameters`, not set as attributes, so that getattr (FSDP2, weight tying) finds the Parameter.
    They are put back after exceptions too (the early stop of activation checkpointing raises one). All of an adapted
    layer's parameters are replaced together, because the adapter's code reads the layer's.
    """

    def __init__(
        self,
        parameters: Mapping[str, Sequence[ParameterProgram]],
        regime: Regime,
    ):
        self.parameters = parameters
        self.regime = regime
        self.leaves: set[str] = set()  # the variants in which the module leaves its weight's gradient (`leave_weights`)
        # The names of the parameters, where they are the same in all variants, all are the module's own, and none is withheld. (What is read
        # here is guarded by each compiled block: the regime would be compared with that of every other module.)
        names = {tuple(program.name for program in programs) for programs in parameters.values()}
        apart = any(program.withheld or "." in program.name for programs in parameters.values() for program in programs)
        self.own = None if apart or len(names) > 1 else names.pop()

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        if self.own is None:
            return self._replaced(forward, module, args, kwargs)
        slots = module._parameters
        for name in self.own:
            # The first question is the cheaper one.
            if type(slots[name]) is not Tensor and isinstance(slots[name], DTensor):
                return self._replaced(forward, module, args, kwargs)
        # An enclosing block has read them all.
        leaves = self.leaves and self.regime.variant in self.leaves
        return leaving(forward, module, args, kwargs) if leaves else forward(*args, **kwargs)

    def _replaced(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        places: list[Place] = []
        locals_ = []
        for program in self.parameters[self.regime.variant]:
            owner, leaf = owner_of(module, program.name)
            parameter = owner._parameters[leaf]
            if program.withheld is not None:
                locals_.append(self._stand_in(parameter, program.withheld))
            elif isinstance(parameter, DTensor):
                self.regime.check_alone(module)
                locals_.append(read(parameter, program, self.regime))
            else:  # an enclosing block has read it
                continue
            places.append((owner._parameters, leaf, parameter))
        return call_with(forward, places, locals_, args, kwargs)

    @staticmethod
    def _stand_in(parameter: Tensor | None, what: StandIn) -> Tensor | None:
        if parameter is None or what == "none":
            return None
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return torch.zeros_like(local, requires_grad=False)


class ParametersBelow:
    """Wraps a forward that reads parameters of modules below it: they become local tensors in it too."""

    def __init__(self, members: Mapping[str, Sequence[Member]], regime: Regime):
        self.members = members
        self.regime = regime

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        places: list[Place] = []
        locals_ = []
        for owner, name, program in self.members[self.regime.variant]:
            parameter = owner._parameters[name]
            places.append((owner._parameters, name, parameter))
            locals_.append(None if parameter is None else read(parameter, program, self.regime))
        return call_with(forward, places, locals_, args, kwargs)
