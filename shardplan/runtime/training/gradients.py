"""The norm of a model's gradients on any mix of meshes and placements, and clipping by it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardplan.core.by_key import by_key
from shardplan.runtime.apply.model_parts import Parted, refuse_parts
from shardplan.torchlib.gathering import full_tensor
from shardplan.torchlib.private import private

_foreach_norm = private("foreach_norm")
_foreach_mul_ = private("foreach_mul_")

Parameters = nn.Module | Parted | Tensor | Iterable[Tensor]
_Ranks = tuple[str, tuple[int, ...]]  # an axis: the type of its devices, and its ranks
EPSILON = 1e-6  # added to the norm in the divisor, as in torch.nn.utils


@dataclass
class _Gradient:
    """This rank's part of a gradient.

    Args:
        mesh: None for a plain tensor, which every rank has whole.
        sums: the axes of the mesh over which it is a partial sum.
        first: whether this rank counts the elements, if several ranks have the same ones.
    """

    local: Tensor
    mesh: DeviceMesh | None = None
    sums: tuple[int, ...] = ()
    first: bool = True


class _Axes:
    """The axes over which the ranks of some meshes are summed. Two axes with the same ranks are one.

    They are computed from all parameters, not only those with gradients, so that all ranks agree.
    """

    def __init__(self, meshes: Iterable[DeviceMesh]):
        self.groups: dict[_Ranks, ProcessGroup] = {}
        self.of_mesh: dict[DeviceMesh, dict[_Ranks, int]] = {}
        for mesh in meshes:
            if mesh in self.of_mesh:
                continue
            if mesh.get_coordinate() is None:
                raise ValueError(
                    f"a parameter is on {mesh}, but this rank is not part of that mesh: pass only parameters that this rank "
                    "has a part of"
                )
            self.of_mesh[mesh] = {}
            for dim in range(mesh.ndim):
                if mesh.size(dim) > 1:
                    group = mesh.get_group(dim)
                    key = (mesh.device_type, tuple(sorted(dist.get_process_group_ranks(group))))
                    self.groups.setdefault(key, group)
                    self.of_mesh[mesh][key] = dim

    def is_sum(self, gradient: _Gradient, axis: _Ranks) -> bool:
        """Whether a gradient is a partial sum over an axis."""
        dim = self.of_mesh[gradient.mesh].get(axis) if gradient.mesh is not None else None
        return dim is not None and dim in gradient.sums


def _parameters(parameters: Parameters, function: str) -> list[Tensor]:
    """Each parameter once: tied ones have several names."""
    if isinstance(parameters, Parted):
        parameters.check_finished()
        return list(parameters.parameters())
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    found = list({id(parameter): parameter for parameter in parameters}.values())
    for parameter in found:
        if not isinstance(parameter, Tensor):
            raise TypeError(f"parameters must be a model or tensors, not {type(parameter).__name__}")
    refuse_parts(found, function)
    return found


def _read(gradient: Tensor) -> _Gradient:
    if not isinstance(gradient, DTensor):
        return _Gradient(gradient)
    mesh, coordinate = gradient.device_mesh, gradient.device_mesh.get_coordinate()
    assert coordinate is not None  # `_Axes` refused a mesh that this rank is not part of
    local, sums, first = gradient.to_local(), [], True
    for dim, placement in enumerate(gradient.placements):
        if isinstance(placement, Partial):
            if placement.reduce_op not in ("sum", "avg"):
                raise ValueError(f"a gradient is {placement} on {mesh}: only sums and averages can be reduced")
            sums.append(dim)
            if placement.reduce_op == "avg":
                local = local / mesh.size(dim)
        if isinstance(placement, Partial | Replicate):
            first = first and coordinate[dim] == 0
    return _Gradient(local, mesh, tuple(sums), first)


def _finish_sums(gradients: list[_Gradient], axes: _Axes) -> None:
    """Reduce partial sums, in float32 and in one buffer for each axis."""
    for key, group in axes.groups.items():
        waiting = [g for g in gradients if axes.is_sum(g, key)]
        if not waiting:
            continue
        dtype = torch.float64 if any(g.local.dtype == torch.float64 for g in waiting) else torch.float32
        flat = torch.cat([g.local.reshape(-1).to(key[0], dtype) for g in waiting])
        dist.all_reduce(flat, group=group)
        for gradient, part in zip(waiting, flat.split([g.local.numel() for g in waiting]), strict=True):
            gradient.local = part


@dataclass(frozen=True)
class _Norm:
    """How numbers become one norm: by sums of powers, or by the maximum (for the minimum, that of the negatives). All of it is
    in float64, so that powers neither overflow nor vanish."""

    order: float

    @property
    def power(self) -> bool:
        return math.isfinite(self.order)

    @property
    def reduction(self) -> dist.ReduceOp.RedOpType:
        return dist.ReduceOp.SUM if self.power else dist.ReduceOp.MAX

    def of(self, tensors: list[Tensor], device: str | torch.device) -> Tensor:
        """[2]: the sum or the maximum, and whether there is a NaN (a maximum over ranks may lose it)."""
        norms = [norm.to(device, torch.float64) for norm in self._each(tensors)]
        value = torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64, device=device)
        if self.power:
            value = value.pow(self.order).sum()
        else:
            sign = math.copysign(1.0, self.order)
            nothing = value.new_full((1,), 0.0 if sign > 0 else -math.inf)
            value = torch.cat([sign * value, nothing]).max()
        return torch.stack([value.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf), value.isnan().double()])

    def _each(self, tensors: list[Tensor]) -> Iterable[Tensor]:
        for group in _alike(tensor for tensor in tensors if tensor.numel()):
            wide = torch.promote_types(group[0].dtype, torch.float32)
            exact = wide if self.order in (1.0, 2.0) or not self.power else torch.float64
            yield from _foreach_norm(group, self.order, dtype=exact)

    def add(self, parts: Tensor) -> Tensor:
        """Combine [n, 2] into [2]."""
        return parts.sum(0) if self.power else parts.amax(0)

    def root(self, total: Tensor) -> Tensor:
        value, nan = total.unbind()
        value = value.pow(1.0 / self.order) if self.power else value * math.copysign(1.0, self.order)
        return value.masked_fill(nan > 0, math.nan)


def _alike(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Lists of one device and dtype, as foreach functions need them."""
    return by_key(((tensor.device, tensor.dtype), tensor) for tensor in tensors).values()


def _counted(parameters: Parameters) -> list[Tensor]:
    """The parameters that count in the norm: a tied parameter of several pipeline stages counts in the first one."""
    found = _parameters(parameters, "get_grad_norm")
    if not isinstance(parameters, Parted):
        return found
    doubled = {id(parameter) for parameter in parameters.doubled}
    return [parameter for parameter in found if id(parameter) not in doubled]


def _device(parameters: Parameters) -> torch.device:
    return parameters.device if isinstance(parameters, Parted) else torch.device("cpu")


@torch.no_grad()
def get_grad_norm(parameters: Parameters, *, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
    """The norm of all gradients together, as if they were one vector of the unsharded model.

    Every element counts once: shards are summed over their mesh axes, elements that several ranks have are counted on
    one of them, partial sums are reduced first, a tied parameter counts once. Plain tensors are taken as whole on every
    rank. Parameters may be on different meshes. It is a collective of all ranks of these meshes: one all-reduce of a
    few numbers for each axis, and one of the partial sums, in float32, if there are any.

    Args:
        parameters: a model, a Pipeline, a parameter, or several. Parameters without a gradient add nothing, but define the
            axes: pass the same on all ranks.
        norm_type: above 0, `inf` or `-inf` (the smallest element).
        error_if_nonfinite: raise if the norm is NaN or infinite; on all ranks.

    Returns:
        A plain scalar on the device of the first gradient, equal on all ranks: in float32, or in float64 if any
        gradient is in float64; 0 without gradients.

    Raises:
        TypeError: no parameters.
        ValueError: another `norm_type`; a parameter on a mesh that this rank is not part of; parameters of pipeline stages
            without their Pipeline, or between the calls of its step.
        RuntimeError: the norm is not finite, and `error_if_nonfinite` is given.
    """
    norm = _Norm(float(norm_type))
    if not (norm.order > 0 or norm.order == -math.inf):
        raise ValueError(f"norm_type must be above 0, inf or -inf, not {norm_type}")
    found = _counted(parameters)
    present = [parameter.grad for parameter in found if parameter.grad is not None]
    axes = _Axes(tensor.device_mesh for tensor in (*found, *present) if isinstance(tensor, DTensor))
    gradients = [_read(gradient) for gradient in present]
    wide = torch.float64 if any(g.local.dtype == torch.float64 for g in gradients) else torch.float32
    device = gradients[0].local.device if gradients else _device(parameters)
    _finish_sums(gradients, axes)

    totals = {
        mesh: norm.of([g.local for g in gradients if g.mesh == mesh and g.first], mesh.device_type)
        for mesh in axes.of_mesh
    }
    for key, group in axes.groups.items():
        members = [mesh for mesh, keys in axes.of_mesh.items() if key in keys]
        stacked = torch.stack([totals[mesh] for mesh in members])
        dist.all_reduce(stacked, norm.reduction, group=group)
        totals |= zip(members, stacked, strict=True)
    plain = norm.of([g.local for g in gradients if g.mesh is None], device)
    added = norm.add(torch.stack([plain, *(part.to(device) for part in totals.values())]))
    if isinstance(parameters, Parted):
        dist.all_reduce(added, norm.reduction, group=parameters.group)
    total = norm.root(added)
    if not gradients and not isinstance(parameters, Parted):
        total = torch.zeros((), device=device)
    total = total.to(wide)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the total norm of the gradients is {total.item()}, so they cannot be clipped; "
            "error_if_nonfinite=False leaves them unchanged"
        )
    return total


@torch.no_grad()
def clip_grad_by_total_norm_(parameters: Parameters, max_norm: float, total_norm: Tensor | float) -> None:
    """Scale the gradients in place by max_norm / (total_norm + 1e-6), if that is below 1. No communication, and no wait for a device.

    If the total norm is NaN or infinite the gradients stay unchanged: scaling would turn all of them into zeros and NaN. Skip the step
    then. A norm on the CPU gives a warning; on another device it is not looked at, as that would wait.

    Args:
        parameters: as in `get_grad_norm`.
        max_norm: for all gradients together, at least 0.
        total_norm: what `get_grad_norm` returned.

    Raises:
        ValueError: `max_norm` is negative or NaN.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be at least 0, not {max_norm}")
    if isinstance(total_norm, DTensor):  # as torch.nn.utils returns it
        total_norm = full_tensor(total_norm)
    norm = total_norm if isinstance(total_norm, Tensor) else torch.tensor(total_norm, dtype=torch.float64)
    coefficient = (max_norm / (norm + EPSILON)).clamp(max=1.0).where(norm.isfinite(), 1.0)
    if norm.device.type == "cpu":
        if not norm.isfinite():
            warnings.warn(
                f"the total norm of the gradients is {norm.item()}: they are left unclipped; skip this step",
                RuntimeWarning,
                stacklevel=3,
            )
        if coefficient == 1.0:
            return
    found = _parameters(parameters, "clip_grad_by_total_norm_")
    gradients = [parameter.grad for parameter in found if parameter.grad is not None]
    for group in _alike(g.to_local() if isinstance(g, DTensor) else g for g in gradients):
        _scale(group, coefficient.to(group[0].device))


def _scale(group: list[Tensor], coefficient: Tensor) -> None:
    """Multiply tensors of one device and dtype in place. The coefficient is not rounded to 16 bits for gradients that have 16."""
    dtype = group[0].dtype
    if dtype.itemsize >= coefficient.dtype.itemsize:
        _foreach_mul_(group, coefficient.to(dtype))
        return
    for gradient in group:
        gradient.copy_(gradient.to(coefficient.dtype) * coefficient)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Parameters, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for every mix of placements: `get_grad_norm`, then `clip_grad_by_total_norm_`.

    Returns:
        The total norm before clipping, as from `get_grad_norm`.
    """
    found = parameters if isinstance(parameters, Parted) else _parameters(parameters, "clip_grad_norm_")
    total = get_grad_norm(found, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite)
    clip_grad_by_total_norm_(found, max_norm, total)
    return total
