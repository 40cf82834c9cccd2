"""Reading parameters: from DTensors to local tensors, and their gradients back.

torch's `DTensor.to_local` does this for one parameter at a time, and builds each gradient's DTensor with all the checks of a user's
call. Here one autograd node reads the parameters of a block, and gives each gradient its parameter's placements. One by one they
would take a third of a small layer's time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from shardplan.core.layout import R, V
from shardplan.core.module_program import ParameterProgram
from shardplan.torchlib.private import private

from .later_weights import keeper
from .own_gradients import given, own_gradients
from .regather import note
from .regime import Regime
from .second_derivatives import refuse_second_derivatives
from .shared_rows import SharedRows
from .tensor_moves import move, scale_gradient, sum_gradients, summed

_FakeTensor = private("FakeTensor")

Member = tuple[nn.Module, str, ParameterProgram]  # (its owner, its name there, how it is stored and read)


class _Read(torch.autograd.Function):
    """Trained parameters as local tensors. In backward their gradients become DTensors with the parameters' placements.
    First partial sums are summed by one all-reduce, and those of shared rows by one reduce-scatter.

    Args:
        programs: one for each parameter.
        gathered: number of a parameter with shared rows -> its gathered tensor.
        rows: those parameters.
    """

    @staticmethod
    def forward(
        ctx: Any,
        programs: Sequence[ParameterProgram],
        gathered: Mapping[int, Tensor],
        rows: SharedRows | None,
        regime: Regime,
        *parameters: DTensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.programs, ctx.rows, ctx.regime = programs, rows, regime
        ctx.shared = {i: (whole.shape, whole.dtype, whole.device) for i, whole in gathered.items()}
        ctx.specs = [parameter._spec for parameter in parameters]
        ctx.locals = locals_ = [parameter._local_tensor for parameter in parameters]
        # detach is the only operator that policies of selective checkpointing do not count: so the second run of a checkpoint inside
        # a block finds the parameters that the first run read.
        return tuple(gathered[i] if i in gathered else local.detach() for i, local in enumerate(locals_))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        found = own_gradients(gradients)
        regime = ctx.regime
        which = [i for i, program in enumerate(ctx.programs) if program.summed]
        if any(found[i] is not None for i in which):
            parts = [part if (part := found[i]) is not None else torch.zeros_like(ctx.locals[i]) for i in which]
            mesh = ctx.specs[which[0]].mesh  # tp; expert parameters may be on ep
            for i, total in zip(which, summed(mesh, parts, regime.reduce_dtype), strict=True):
                found[i] = used(found[i], total)
        if any(found[i] is not None for i in ctx.shared):
            parts = [
                part if (part := found[i]) is not None else torch.zeros(shape, dtype=dtype, device=device)
                for i, (shape, dtype, device) in ctx.shared.items()
            ]
            for i, total in zip(ctx.shared, ctx.rows.reduce(parts, regime.reduce_dtype), strict=True):
                found[i] = used(found[i], total)
        specs, locals_ = ctx.specs, ctx.locals
        for i, gradient in enumerate(found):
            if gradient is not None:
                if (share := regime.share(ctx.programs[i])) != 1.0:
                    gradient = gradient * share
                found[i] = given(gradient, specs[i], locals_[i].stride())
        return (None, None, None, None, *found)


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
        return _read_together([parameter], [program], regime)[0]
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


def _read_together(
    parameters: Sequence[DTensor], programs: Sequence[ParameterProgram], regime: Regime, *, plain: bool = False
) -> Sequence[Tensor]:
    """
    Args:
        plain: whether the programs are known to gather and to divide nothing.
    """
    checked = None
    for parameter in parameters:
        if (mesh := parameter._spec.mesh) is checked:
            continue
        checked = mesh
        if mesh.ndim > 1 and mesh.size() > mesh.size(mesh.ndim - 1):
            raise RuntimeError(
                f"a module with a parameter of shape {list(parameter.shape)} was called by itself, and FSDP2 has not gathered its "
                "parameters: they belong to a unit around it, which gathers them when the unit is called. Call the model: model(..., "
                "output_hidden_states=True).hidden_states has what its blocks return"
            )
    trained = [i for i, p in enumerate(parameters) if p.requires_grad] if torch.is_grad_enabled() else []
    if plain and len(trained) == len(parameters):  # the rest of this function, for most blocks
        return _Read.apply(programs, {}, None, regime, *parameters)
    shared = [] if plain else [i for i, program in enumerate(programs) if program.shared]
    rows = _rows(parameters, programs, shared, regime) if shared else None
    gathered = dict(zip(shared, rows.gather(), strict=True)) if rows is not None else {}
    locals_ = [gathered.get(i, p._local_tensor) for i, p in enumerate(parameters)]
    if trained:
        own = [i for i in trained if i in gathered]
        read = _Read.apply(
            [programs[i] for i in trained],
            {trained.index(i): gathered[i] for i in own},
            _rows(parameters, programs, own, regime) if own else None,
            regime,
            *(parameters[i] for i in trained),
        )
        for i, local in zip(trained, read, strict=True):
            locals_[i] = local
    if rows is not None:
        note([locals_[i] for i in shared], rows.gather)
    for i, program in () if plain else enumerate(programs):
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


def call_with(
    forward: Callable[..., Any],
    members: Sequence[tuple[nn.Module, str, Tensor | None]],
    locals_: Iterable[Tensor | None],
    args: tuple,
    kwargs: dict,
) -> Any:
    """Call with other modules' parameters replaced by local tensors."""
    slots = [slots_of(owner) for owner, _, _ in members]
    try:
        for own, (_, name, _), local in zip(slots, members, locals_, strict=True):
            own[name] = local
        return forward(*args, **kwargs)
    finally:
        for own, (_, name, parameter) in zip(slots, members, strict=True):
            own[name] = parameter


def slots_of(module: nn.Module) -> dict[str, Any]:
    """The dict in which a module's forward finds its parameters; while it runs, they may be plain tensors."""
    return module._parameters


class Reads:
    """Wraps a block's forward: its parameters are read together by one autograd node. The node's backward sums their
    partial gradients by one all-reduce.

    Args:
        members: variant -> its parameters.
    """

    def __init__(self, members: Mapping[str, Sequence[Member]], regime: Regime):
        self.members = members
        self.regime = regime
        self.plain = {
            variant: not any(program.shared or program.moved for _, _, program in own)
            for variant, own in members.items()
        }

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        if torch.compiler.is_compiling():
            return _traced_together(forward, self.members[self.regime.variant], self.regime, args, kwargs)
        regime = self.regime
        found = [
            (owner, name, parameter, program)
            for owner, name, program in self.members[regime.variant]
            if isinstance(parameter := owner._parameters[name], DTensor)
        ]
        if not found:
            return forward(*args, **kwargs)
        owners, names, parameters, programs = zip(*found, strict=True)
        locals_ = _read_together(parameters, programs, regime, plain=self.plain[regime.variant])
        slots = list(zip(owners, names, parameters, strict=True))
        before, regime.keeper = regime.keeper, keeper()
        try:
            return call_with(forward, slots, locals_, args, kwargs)
        finally:
            regime.keeper = before


def _traced_together(
    forward: Callable[..., Any], members: Sequence[Member], regime: Regime, args: tuple, kwargs: dict
) -> Any:
    """`Reads` in a graph that is being compiled: only for parameters whose gradients are summed. (Loops, because torch.compile cannot
    trace a comprehension with a closure inside a checkpoint.)"""
    slots: list[tuple[nn.Module, str, DTensor]] = []
    locals_: list[Tensor] = []
    for owner, name, program in members:
        parameter = owner._parameters[name]
        if program.summed and isinstance(parameter, DTensor) and parameter.requires_grad:
            slots.append((owner, name, parameter))
            locals_.append(parameter.to_local(grad_placements=[Replicate()]))
    if not slots or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    summing = sum_gradients(slots[0][2].device_mesh, locals_, regime.reduce_dtype)
    return call_with(forward, slots, summing, args, kwargs)
