"""Whether replicated weights are the same on all ranks."""

from __future__ import annotations

import warnings
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardplan.core.first_few import in_a_row
from shardplan.core.mesh import Axis

from .agreement import least
from .plan_mesh import PlanMesh
from .same_inputs import content
from .watched import Looks, Watched

SHOWN = 3
BEGINNING = 64  # elements of a parameter that tell two initialisations apart
APART = (
    "the ranks drew their weights from different seeds, so split weights are put together from several initialisations: call "
    "torch.manual_seed with one number on all ranks before the model is built, or load a checkpoint"
)
PIECE = 2**24  # elements summed at once, to bound the memory


def same_weights(watched: Watched) -> Looks:
    """Make the first training forward compare the weights over the axes on which they are replicated: tp for whole parameters, dp_replicate
    under HSDP. Weights that each rank made from its own seed would train apart silently.

    RuntimeError on all ranks; where weights differ it names the axis and the parameters. Only DTensors are compared:
    DistributedDataParallel broadcasts its parameters.
    """

    def look(module: nn.Module, args: Any, kwargs: Any) -> bool:
        if not (module.training and torch.is_grad_enabled()):
            return False
        wrong = [text for (one, dim), found in _replicated(module).items() if (text := _difference(one, dim, found))]
        if least([-bool(wrong)], watched.mesh.mesh) != [0]:  # on any rank
            where = "; ".join(wrong) or "those of other ranks; their errors name them"
            raise RuntimeError(
                f"ranks that store the same weights have different ones: {where}. Load a checkpoint, build the model from one "
                "seed on all ranks, or let apply_plan send the weights of one rank (src_data_rank=0)"
            )
        return True

    return {watched.outer: look}


def drawn_apart(model: nn.Module, mesh: PlanMesh, src_data_rank: int | None) -> tuple[bool, ...]:
    """For each parameter, whether its first elements differ between the ranks that will keep parts of it, before it is split; () on the
    meta device.

    Args:
        src_data_rank: the tp rank that sends its weights to the others; None: each tp rank keeps a part of its own.
    """
    axes = (Axis.DP_SHARD, Axis.CP, *((Axis.TP,) if src_data_rank is None else ()))
    over = [mesh.axes[axis] for axis in axes if axis in mesh.axes]
    if not over or any(parameter.is_meta for parameter in model.parameters()):
        return ()
    found = [number % 2**56 for number in _beginnings(model).tolist()]
    smallest = [*found, *(-number for number in found)]
    for axis in over:
        smallest = least(smallest, axis)
    return tuple(low != -high for low, high in zip(smallest[: len(found)], smallest[len(found) :], strict=True))


def one_initialisation(watched: Watched) -> Looks:
    """Warn in the first training forward where ranks drew their weights from different seeds, and none were loaded since. Each split weight
    is then put together from parts of several initialisations: training is correct, but no seed reproduces it, and no other mesh."""
    if not any(watched.drawn_apart):
        return {}
    before = _beginnings(watched.outer)

    def look(module: nn.Module, args: Any, kwargs: Any) -> bool:
        if not (module.training and torch.is_grad_enabled()):
            return False
        now = _beginnings(watched.outer)
        kept = (
            len(now) == len(before) == len(watched.drawn_apart)
            and (now == before)[torch.tensor(watched.drawn_apart)].any()
        )
        if kept and dist.get_rank() == 0:
            warnings.warn(APART, stacklevel=2)
        return True

    return {watched.outer: look}


def _beginnings(model: nn.Module) -> Tensor:
    """A number for the first elements of each parameter, as this rank stores it; on the CPU, moved there at once from each device."""
    parts = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    strided = (one.detach() for one in parts if one.layout == torch.strided)
    sums = [content(one.reshape(-1)[:BEGINNING]) for one in strided]
    found = torch.zeros(len(sums), dtype=torch.int64)
    for device in dict.fromkeys(one.device for one in sums):
        there = [i for i, one in enumerate(sums) if one.device == device]
        found[there] = torch.stack([sums[i] for i in there]).cpu()
    return found


def checksum(x: Tensor) -> Tensor:
    """A number for the bits of a strided tensor and their places: an int64 scalar on its device."""
    pieces = [content(piece) * (2 * i + 1) for i, piece in enumerate(x.detach().reshape(-1).split(PIECE))]
    return torch.stack(pieces).sum()


def _replicated(model: nn.Module) -> dict[tuple[DeviceMesh, int], dict[str, Tensor]]:
    """(mesh, its dim) -> name -> this rank's tensor, for the parameters that are replicated there."""
    found: dict[tuple[DeviceMesh, int], dict[str, Tensor]] = defaultdict(dict)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            for dim, placement in enumerate(parameter.placements):
                if isinstance(placement, Replicate) and parameter.device_mesh.size(dim) > 1:
                    found[parameter.device_mesh, dim][name] = parameter.to_local()
    return found


def _difference(mesh: DeviceMesh, dim: int, found: dict[str, Tensor]) -> str:
    """The parameters that differ over a dim of a mesh, in words; "" for none."""
    sums = torch.stack([checksum(one) for one in found.values()]).to(mesh.device_type)  # from the CPU under cpu_offload
    table = sums.repeat(mesh.size(dim), 1)
    dist.all_gather(list(table.unbind()), sums, group=mesh.get_group(dim))
    wrong = [name for name, column in zip(found, table.T.tolist(), strict=True) if len(set(column)) > 1]
    if not wrong:
        return ""
    axis = mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else str(dim)
    return f"over {axis} {in_a_row(wrong, SHOWN)}"
