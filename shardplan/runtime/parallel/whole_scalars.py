"""Parameters without dimensions or without elements under FSDP2, which splits dim 0 of every parameter, refuses scalars and cannot reduce
the gradient of nothing.

They are stored whole on all ranks, as DTensors on the mesh of FSDP2's own parameters, so that optimizers, norms and
checkpoints see one kind of parameter. In the forwards that read them they are like FSDP2's gathered parameters: plain
tensors, or DTensors on the tp mesh. In backward their gradients are averaged over the data-parallel ranks, by one all-reduce
for each module and axis, in float32 at least.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardplan.core.tree import full_name
from shardplan.torchlib.private import private

from .forward import wrap_forward
from .own_gradients import own_gradients
from .reading import Place, call_with, used
from .second_derivatives import refuse_second_derivatives
from .tensor_moves import summed

_DeviceMesh = private("DeviceMesh")


@dataclass(frozen=True)
class Meshes:
    """The meshes of scalars.

    Args:
        stored: the data-parallel axes and tp.
        axes: each data-parallel axis, of one dimension.
        tp: None where it does not split the model.
        dtype: the dtype that they are computed in; None: their own.
    """

    stored: DeviceMesh
    axes: tuple[DeviceMesh, ...]
    tp: DeviceMesh | None
    dtype: torch.dtype | None


def meshes_of(mesh: DeviceMesh, tp: DeviceMesh | None, dtype: torch.dtype | None) -> Meshes:
    """The meshes of scalars in a model that FSDP2 shards.

    Args:
        mesh: [dp_replicate,] dp_shard.
        tp: None where parameters are not DTensors on it.
        dtype: the dtype to which FSDP2 casts the parameters that it gathers.
    """
    names = mesh.mesh_dim_names or ()
    axes = (mesh,) if mesh.ndim == 1 else tuple(mesh[name] for name in names)
    stored = mesh if tp is None else _DeviceMesh._concatenate([mesh, tp])
    return Meshes(stored, axes, tp, dtype)


def is_whole(parameter: Tensor) -> bool:
    """Whether FSDP2 cannot have a parameter."""
    return not parameter.ndim or not parameter.numel()


class _Read(torch.autograd.Function):
    """Scalars as a module's code reads them."""

    @staticmethod
    def forward(ctx: Any, meshes: Meshes, *parameters: DTensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.meshes, ctx.specs = meshes, [parameter._spec for parameter in parameters]
        ctx.zeros = [torch.zeros_like(parameter._local_tensor) for parameter in parameters]
        return tuple(_inner(parameter, meshes) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        own = own_gradients([g._local_tensor if isinstance(g, DTensor) else g for g in gradients])
        if all(gradient is None for gradient in own):
            return None, *own
        parts = [zero if g is None else g.to(zero.dtype) for g, zero in zip(own, ctx.zeros, strict=True)]
        ranks, exact = 1, torch.promote_types(parts[0].dtype, torch.float32)
        for axis in ctx.meshes.axes:
            parts, ranks = summed(axis, parts, exact), ranks * axis.size()
        found: list[Tensor | None] = []
        for gradient, total, spec in zip(own, parts, ctx.specs, strict=True):
            whole = used(gradient, total / ranks)
            found.append(None if whole is None else DTensor.__new__(DTensor, whole, spec, requires_grad=False))
        return None, *found


def _inner(parameter: DTensor, meshes: Meshes) -> Tensor:
    local = parameter._local_tensor.detach()
    if meshes.dtype is not None:
        local = local.to(meshes.dtype)
    return local if meshes.tp is None else DTensor.from_local(local, meshes.tp, [Replicate()], run_check=False)


class ReadsScalars:
    """Wraps a forward: while it runs, the module's scalars have the form that its code reads. They are put back after exceptions too.

    Args:
        scalars: these: (their owner, their name there).
    """

    def __init__(self, scalars: Sequence[tuple[nn.Module, str]], meshes: Meshes):
        self.scalars, self.meshes = tuple(scalars), meshes

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        places: list[Place] = []
        parameters: list[DTensor] = []
        for owner, name in self.scalars:
            parameter = owner._parameters[name]
            if isinstance(parameter, DTensor) and parameter.device_mesh == self.meshes.stored:
                places.append((owner._parameters, name, parameter))
                parameters.append(parameter)  # else an enclosing module has read it
        return call_with(forward, places, self._read(parameters), args, kwargs)

    def _read(self, parameters: Sequence[DTensor]) -> Sequence[Tensor]:
        trained = {id(p): p for p in parameters if p.requires_grad and torch.is_grad_enabled()}
        read = dict(zip(trained, _Read.apply(self.meshes, *trained.values()) if trained else (), strict=True))
        return [read[id(p)] if id(p) in read else _inner(p, self.meshes) for p in parameters]


def store_scalars(
    model: nn.Module, readers: Callable[[str], Iterable[str]], meshes: Meshes, ignored: Container[str]
) -> bool:
    """Put the scalars of a model on the mesh, and wrap the forwards that read them. Tied scalars stay one Parameter, and
    frozen ones stay frozen.

    Args:
        readers: a parameter's module -> itself and the modules around it whose forwards read it.
        ignored: names of parameters that are left as they are.

    Returns:
        Whether there are any scalars.
    """
    new: dict[int, nn.Parameter] = {}
    places: dict[str, list[tuple[nn.Module, str]]] = {}
    for home, module in list(model.named_modules()):
        for leaf, parameter in list(module._parameters.items()):
            if parameter is None or not is_whole(parameter) or full_name(home, leaf) in ignored:
                continue
            new.setdefault(id(parameter), _stored(parameter, meshes))
            module._parameters[leaf] = new[id(parameter)]
            for reader in readers(home):
                places.setdefault(reader, []).append((module, leaf))
    for reader, found in places.items():
        wrap_forward(model.get_submodule(reader), ReadsScalars(found, meshes))
    return bool(new)


def _stored(parameter: nn.Parameter, meshes: Meshes) -> nn.Parameter:
    local = parameter.detach()
    local = local._local_tensor if isinstance(local, DTensor) else local
    if not local.is_meta:
        local = local.to(meshes.stored.device_type)
    replicated = [Replicate()] * meshes.stored.ndim
    new = nn.Parameter(
        DTensor.from_local(local, meshes.stored, replicated, run_check=False), requires_grad=parameter.requires_grad
    )
    new.__dict__.update(parameter.__dict__)  # libraries mark parameters with attributes
    return new
