"""Reading parameters: from DTensors to local tensors, and their gradients back.

torch's `DTensor.to_local` does this for one parameter at a time, and builds each gradient's DTensor with all the checks of a user's
call. Here one autograd node reads the parameters of a block, and gives each gradient its parameter's placements. One by one they
would take a third of a small layer's time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardplan.core.layout import R, V
from shardplan.core.mesh import Axis
from shardplan.core.module_program import ParameterProgram
from shardplan.torchlib.direct_function import DirectFunction
from shardplan.torchlib.private import private

from .later_weights import eager_keeper
from .own_gradients import given, own_gradients
from .regather import note
from .regime import Regime
from .second_derivatives import refuse_second_derivatives
from .shared_rows import SharedRows
from .tensor_moves import move, scale_gradient, sum_gradients, summed

_FakeTensor = private("FakeTensor")

Member = tuple[nn.Module, str, ParameterProgram]  # (its owner, its name there, how it is stored and read)


class _Together:
    """Parameters that one node reads, as their block's every step needs to know them.

    Args:
        programs: one for each parameter.

    Attributes:
        plain: whether they gather and divide nothing.
        summed, on_ep: the numbers of those whose gradients are partial sums, and of those that are distributed over ep.
        mesh: the last mesh on which they were found readable; a mesh computes its size anew for each question.
    """

    __slots__ = ("mesh", "on_ep", "plain", "programs", "summed")

    def __init__(self, programs: Sequence[ParameterProgram]):
        self.programs = programs
        self.plain = not any(program.shared or program.moved for program in programs)
        self.summed = [i for i, program in enumerate(programs) if program.summed]
        self.on_ep = [i for i, program in enumerate(programs) if program.stored.axis is Axis.EP]
        self.mesh: DeviceMesh | None = None


class _How(NamedTuple):
    """How parameters are read: one argument, as each costs the host.

    Args:
        together: the parameters.
        regime: their model's.
        gathered: number of a parameter with shared rows -> its gathered tensor.
        rows: those parameters.
    """

    together: _Together
    regime: Regime
    gathered: Mapping[int, Tensor]
    rows: SharedRows | None


class _Read(DirectFunction):
    """Trained parameters as local tensors. In backward their gradients become DTensors with the parameters' placements.
    First partial sums are summed by one all-reduce, and those of shared rows by one reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, how: _How, *parameters: DTensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        together, regime, gathered, rows = how
        shared = {i: (whole.shape, whole.dtype, whole.device) for i, whole in gathered.items()}
        locals_ = [parameter._local_tensor for parameter in parameters]
        ctx.read = together, regime, shared, rows, [parameter._spec for parameter in parameters], locals_
        # detach is the only operator that policies of selective checkpointing do not count: so the second run of a checkpoint inside
        # a block finds the parameters that the first run read.
        if not gathered:
            return tuple([local.detach() for local in locals_])
        return tuple([gathered[i] if i in gathered else local.detach() for i, local in enumerate(locals_)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        found = own_gradients(gradients)
        together, regime, shared, rows, specs, locals_ = ctx.read
        which = together.summed
        if which and any(found[i] is not None for i in which):
            parts = [part if (part := found[i]) is not None else torch.zeros_like(locals_[i]) for i in which]
            mesh = specs[which[0]].mesh  # tp; expert parameters may be on ep
            for i, total in zip(which, summed(mesh, parts, regime.reduce_dtype), strict=True):
                found[i] = used(found[i], total)
        if shared and any(found[i] is not None for i in shared):
            parts = [
                part if (part := found[i]) is not None else torch.zeros(shape, dtype=dtype, device=device)
                for i, (shape, dtype, device) in shared.items()
            ]
            for i, total in zip(shared, rows.reduce(parts, regime.reduce_dtype), strict=True):
                found[i] = used(found[i], total)
        for i in together.on_ep if regime.expert_share != 1.0 else ():
            if (gradient := found[i]) is not None:
                found[i] = gradient * regime.expert_share
        for i, gradient in enumerate(found):
            if gradient is not None:
                found[i] = given(gradient, specs[i], locals_[i])
        return (None, *found)


def used(own: Tensor | None, total: Tensor) -> Tensor | None:
    """The gradient, summed over the ranks; None where no rank has one, as on the unsharded model: optimizers then skip the parameter."""
    unused = own is None and not isinstance(total, _FakeTensor) and not total.any()
    return None if unused else total


def read(parameter: Tensor, program: ParameterProgram, regime: Regime) -> Tensor:
    """The value of a DTensor parameter for a module's code: its local tensor, moved to the computed layout. A partial
    gradient is summed over tp before it reaches the DTensor.

    Other tensors (already read by an enclosing block) are returned unchanged.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if not torch.compiler.is_compiling():
        return _read_together([parameter], _Together([program]), regime)[0]
    local = _traced(parameter, program, regime)
    if program.shared:
        return _gathered_in_graph(local, parameter, program, regime)
    return _moved(local, parameter, program) if program.moved else local


def _gathered_in_graph(local: Tensor, parameter: DTensor, program: ParameterProgram, regime: Regime) -> Tensor:
    """Gather shared rows in a graph that is being compiled: piece by piece."""
    dim = program.dim
    assert dim is not None
    pieces = program.pieces(parameter.device_mesh.size(), local.shape[dim])
    parts = []
    for (_, copies), part in zip(pieces, local.split([length for length, _ in pieces], dim), strict=True):
        if copies > 1:
            part = move(part, regime.neighbours[copies], V(dim), R)
        parts.append(part)
    return torch.cat(parts, dim)


def _read_together(parameters: Sequence[DTensor], together: _Together, regime: Regime) -> Sequence[Tensor]:
    for parameter in parameters:
        if (mesh := parameter._spec.mesh) is together.mesh:
            continue
        if mesh.ndim > 1 and mesh.size() > mesh.size(mesh.ndim - 1):
            raise RuntimeError(
                f"a module with a parameter of shape {list(parameter.shape)} was called by itself, and FSDP2 has not gathered its "
                "parameters: they belong to a unit around it, which gathers them when the unit is called. Call the model: model(..., "
                "output_hidden_states=True).hidden_states has what its blocks return"
            )
        together.mesh = mesh
    trained = [i for i, p in enumerate(parameters) if p.requires_grad] if torch.is_grad_enabled() else []
    if together.plain and len(trained) == len(parameters):  # the rest of this function, for most blocks
        return _Read.apply(_How(together, regime, {}, None), *parameters)
    programs = together.programs
    shared = [] if together.plain else [i for i, program in enumerate(programs) if program.shared]
    rows = _rows(parameters, programs, shared, regime) if shared else None
    gathered = dict(zip(shared, rows.gather(), strict=True)) if rows is not None else {}
    locals_ = [gathered.get(i, p._local_tensor) for i, p in enumerate(parameters)]
    if trained:
        own = [i for i in trained if i in gathered]
        read = _Read.apply(
            _How(
                _Together([programs[i] for i in trained]),
                regime,
                {trained.index(i): gathered[i] for i in own},
                _rows(parameters, programs, own, regime) if own else None,
            ),
            *(parameters[i] for i in trained),
        )
        for i, local in zip(trained, read, strict=True):
            locals_[i] = local
    if rows is not None:
        note([locals_[i] for i in shared], rows.gather)
    for i, program in () if together.plain else enumerate(programs):
        if program.moved:
            locals_[i] = _moved(locals_[i], parameters[i], program)
    return locals_


def _rows(
    parameters: Sequence[DTensor], programs: Sequence[ParameterProgram], chosen: Sequence[int], regime: Regime
) -> SharedRows:
    stored = [parameters[i]._local_tensor for i in chosen]
    ranks = parameters[chosen[0]].device_mesh.size()
    return SharedRows([programs[i] for i in chosen], stored, regime.neighbours, ranks)


def _moved(local: Tensor, parameter: DTensor, program: ParameterProgram) -> Tensor:
    """The local tensor in the layout that the module's code reads: gathered, or divided."""
    size = None if program.dim is None else parameter.shape[program.dim]
    return move(local, parameter.device_mesh, program.stored, program.computed, size=size)


def _traced(parameter: DTensor, program: ParameterProgram, regime: Regime) -> Tensor:
    """`read` in a graph that is being compiled, with the DTensor functions that torch.compile supports."""
    local = parameter.to_local(grad_placements=parameter.placements)
    if program.summed and local.requires_grad:
        (local,) = sum_gradients(parameter.device_mesh, [local], regime.reduce_dtype)
    return scale_gradient(local, regime.share(program)) if local.requires_grad else local


# A place of a parameter: the dict in which its module's forward finds it, its name there, and itself. While a forward runs, plain tensors
# may be in these dicts.
Place = tuple[dict[str, Any], str, Tensor | None]


def call_with(
    forward: Callable[..., Any], places: Sequence[Place], locals_: Iterable[Tensor | None], args: tuple, kwargs: dict
) -> Any:
    """Call while parameters or buffers are replaced by local tensors; they are put back after exceptions too."""
    try:
        for (slots, name, _), local in zip(places, locals_, strict=True):
            slots[name] = local
        return forward(*args, **kwargs)
    finally:
        for slots, name, parameter in places:
            slots[name] = parameter


class Reads:
    """Wraps a block's forward: its parameters are read together by one autograd node. The node's backward sums their
    partial gradients by one all-reduce.

    Args:
        members: variant -> its parameters.
    """

    def __init__(self, members: Mapping[str, Sequence[Member]], regime: Regime):
        self.members = members
        self.regime = regime
        self.together = {variant: _Together([program for *_, program in own]) for variant, own in members.items()}

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        regime = self.regime
        members, together = self.members[regime.variant], self.together[regime.variant]
        if torch.compiler.is_compiling():
            return _traced_together(forward, members, regime, args, kwargs)
        places: list[tuple[dict[str, Any], str, Any]] = [
            (owner._parameters, name, parameter)
            for owner, name, _ in members
            if isinstance(parameter := owner._parameters[name], DTensor)
        ]
        if not places:
            return forward(*args, **kwargs)
        if len(places) < len(members):
            together = _Together([pr for owner, name, pr in members if isinstance(owner._parameters[name], DTensor)])
        locals_ = _read_together([parameter for *_, parameter in places], together, regime)
        before, regime.keeper = regime.keeper, eager_keeper()
        try:
            return call_with(forward, places, locals_, args, kwargs)
        finally:
            regime.keeper = before


def _traced_together(
    forward: Callable[..., Any], members: Sequence[Member], regime: Regime, args: tuple, kwargs: dict
) -> Any:
    """`Reads` in a graph that is being compiled: only for parameters whose gradients are summed. (Loops, because torch.compile cannot
    trace a comprehension with a closure inside a checkpoint.)"""
    places: list[Place] = []
    locals_: list[Tensor] = []
    for owner, name, program in members:
        parameter = owner._parameters[name]
        if program.summed and isinstance(parameter, DTensor) and parameter.requires_grad:
            places.append((owner._parameters, name, parameter))
            locals_.append(parameter.to_local(grad_placements=[Replicate()]))
    if not places or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    first = places[0][2]
    assert isinstance(first, DTensor)
    summing = sum_gradients(first.device_mesh, locals_, regime.reduce_dtype)
    return call_with(forward, places, summing, args, kwargs)
