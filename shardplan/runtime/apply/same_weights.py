"""Whether replicated weights are the same on all ranks."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from .agreement import least
from .same_inputs import content
from .watched import Looks, Watched

SHOWN = 3
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
    return f"over {axis} {', '.join(wrong[:SHOWN])}" + (f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else "")
