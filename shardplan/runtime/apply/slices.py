"""Whole tensors and the slices that a planned model keeps of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeGuard

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from shardplan.torchlib.gathering import full_tensor
from shardplan.torchlib.packing import pack, unpack


@dataclass(frozen=True, slots=True)
class Packing:
    """How a parameter is packed.

    Args:
        dim: the packed dim.
        parts: the sizes of its parts.
    """

    dim: int
    parts: tuple[int, ...]


class _Split(Protocol):
    """A placement that splits a dim: a Shard, or FSDP2's strided one; they share no base class."""

    dim: int


def splits(placement: Placement) -> TypeGuard[_Split]:
    """Whether a parameter's placement splits it: it is not a partial sum."""
    return not placement.is_replicate()


def cuts(stored: DTensor) -> list[tuple[int, int]]:
    """(mesh axis, dim) of each cut, in the order of cutting: over tp first, then (strided) over FSDP's axes."""
    sharded = [(axis, placement) for axis, placement in enumerate(stored.placements) if splits(placement)]
    return [(axis, placement.dim) for axis, placement in sorted(sharded, key=lambda cut: type(cut[1]) is not Shard)]


def _own_slice(whole: Tensor, stored: DTensor) -> Tensor:
    """This rank's part of a whole tensor, cut like `stored`."""
    mesh = stored.device_mesh
    local = whole
    for axis, dim in cuts(stored):
        chunks = local.chunk(mesh.size(axis), dim=dim)
        rank = mesh.get_local_rank(axis)
        local = chunks[rank] if rank < len(chunks) else local.narrow(dim, 0, 0)
    return local


def like(whole: Tensor, stored: DTensor, packed: Packing | None = None) -> DTensor:
    """Make a whole tensor, with rows in the original order, a DTensor stored like another one.

    Args:
        whole: on every rank.
        stored: a parameter of a planned model (its last mesh axis is tp where it is packed).
        packed: how it is packed, if it is.
    """
    device = whole.device if stored.is_meta else stored.device  # load_state_dict(assign=True) fills a meta model
    whole = whole.to(device=device, dtype=stored.dtype)
    if packed is not None:
        whole = pack(whole, packed.dim, packed.parts, stored.device_mesh.size(stored.device_mesh.ndim - 1))
    return DTensor.from_local(
        _own_slice(whole, stored).contiguous(),
        stored.device_mesh,
        stored.placements,
        run_check=False,
        shape=stored.shape,
        stride=stored.stride(),
    )


def gathered(stored: DTensor) -> Tensor:
    """The whole tensor on the mesh's device, with rows in the stored order. A collective."""
    local = stored.to_local().to(stored.device_mesh.device_type)  # FSDP2 may keep it on the CPU
    placed = DTensor.from_local(
        local, stored.device_mesh, stored.placements, run_check=False, shape=stored.shape, stride=stored.stride()
    )
    return full_tensor(placed)


def in_original_order(whole: Tensor, packed: Packing | None, tp: int) -> Tensor:
    """A gathered tensor with its rows in the original order."""
    return unpack(whole, packed.dim, packed.parts, tp) if packed is not None else whole
