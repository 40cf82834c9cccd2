"""The indices of a whole tensor that this rank holds, so that a checkpoint's tensor is read in slices.

Indices are those of the original order: the packed order is a list of ranges in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardplan.runtime.apply.slices import Packing, cuts
from shardplan.torchlib.packing import packed_ranges

from .lazy import Box

Ranges = tuple[tuple[int, int], ...]  # [start, stop), in stored order; none is empty


def own_ranges(stored: DTensor, packed: Packing | None, rank: int | None = None) -> tuple[Ranges, ...]:
    """The indices that this rank's part of a parameter holds, per dim.

    Args:
        stored: a parameter of a planned model (its last mesh axis is tp where it is packed).
        packed: how it is packed, if it is.
        rank: compute it for this rank, not for the current one; along each mesh axis the ranks must have one stride.
    """
    mesh = stored.device_mesh
    ranges: list[Ranges] = [((0, size),) if size else () for size in stored.shape]
    if packed is not None:
        ranges[packed.dim] = packed_ranges(packed.parts, mesh.size(mesh.ndim - 1))
    for axis, dim in cuts(stored):
        ranges[dim] = chunk(ranges[dim], mesh.size(axis), _place(mesh, axis, rank))
    return tuple(_joined(one) for one in ranges)


def _place(mesh: DeviceMesh, axis: int, rank: int | None) -> int:
    if rank is None or mesh.size(axis) == 1:
        return mesh.get_local_rank(axis)
    first, second = mesh.mesh.movedim(axis, 0).flatten(1)[:2, 0].tolist()
    return rank // (second - first) % mesh.size(axis)


def boxes_of(ranges: Sequence[Ranges]) -> Iterator[tuple[Box, Box]]:
    """The place of each box of a rank's part: in that part, and in the whole tensor."""
    for placed in product(*map(_placed, ranges)):
        yield tuple(place for place, _ in placed), tuple(box for _, box in placed)


def _placed(ranges: Ranges) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    placed, position = [], 0
    for start, stop in ranges:
        placed.append(((position, position + stop - start), (start, stop)))
        position += stop - start
    return placed


def chunk(ranges: Ranges, count: int, index: int) -> Ranges:
    """The part at `index` of `count`, as `torch.chunk` cuts: all have the same length, rounded up, except the last ones."""
    length = sum(stop - start for start, stop in ranges)
    size = -(-length // count)
    first, last = min(index * size, length), min((index + 1) * size, length)
    kept, position = [], 0
    for start, stop in ranges:
        low, high = max(first, position), min(last, position + stop - start)
        if low < high:
            kept.append((start + low - position, start + high - position))
        position += stop - start
    return tuple(kept)


def _joined(ranges: Ranges) -> Ranges:
    """Adjacent ranges joined into one."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
