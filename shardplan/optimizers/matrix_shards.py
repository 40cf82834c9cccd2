"""Which ranks have which parts of a matrix, or of a stack of matrices."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from shardplan.core.plan import MatrixParts
from shardplan.runtime.apply.slices import Packing, cuts
from shardplan.torchlib.local_parts import to_local_if_dtensor
from shardplan.torchlib.packing import pack, packed_ranges, unpack

Range = tuple[int, int]  # start, end
Box = tuple[Range, Range, Range]  # of matrices, rows and columns


@dataclass(frozen=True, eq=False)
class Stack:
    """A parameter as a stack of matrices [matrices, rows, columns]; one with two dims is a stack of one.

    Args:
        name: the parameter's.
        shape: the whole stack's.
        group: the ranks that share it; None: this rank has it whole.
        boxes: each rank's part, by the rank's index in the group.
        place: this rank's index in the group.
        packing: the order in which the plan stores the rows, along a dim of the stack; None: the original one.
        tp: the size of the axis for which the rows are packed.
        parts: the sizes of separate matrices along `part_dim`; empty: there is only one.
    """

    name: str
    parameter: Tensor
    shape: tuple[int, int, int]
    group: ProcessGroup | None
    boxes: tuple[Box, ...]
    place: int
    packing: Packing | None
    tp: int
    parts: tuple[int, ...] = ()
    part_dim: int = 1

    @property
    def box(self) -> Box:
        return self.boxes[self.place]

    @cached_property
    def work(self) -> int:
        """The work of stepping one of its matrices, in multiplications of a Newton-Schulz step."""
        sizes = self.parts or (self.shape[self.part_dim],)
        other = self.shape[3 - self.part_dim]
        return sum(min(size, other) ** 2 * (2 * max(size, other) + min(size, other)) for size in sizes)

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor stored like the parameter, as [matrices, rows, columns] in the same memory."""
        own = to_local_if_dtensor(tensor)
        return own if own.ndim == 3 else own.unsqueeze(0)

    def in_parts(self, whole: Tensor) -> list[Tensor]:
        """Matrices [n, rows, columns] in the stored order, split into the matrices of the unsharded model."""
        if self.packing is not None:
            whole = unpack(whole, self.packing.dim, self.packing.parts, self.tp)
        return [part.contiguous() for part in whole.split(self.parts, self.part_dim)] if self.parts else [whole]

    def in_one(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `in_parts`."""
        whole = torch.cat(list(parts), self.part_dim) if self.parts else parts[0]
        return whole if self.packing is None else pack(whole, self.packing.dim, self.packing.parts, self.tp)

    @cached_property
    def stripes(self) -> tuple[tuple[Range, tuple[int, int]], ...]:
        """The ranges of this rank's box along `part_dim` by the shape of their matrices, on which the learning rate may depend."""
        rows, columns = self.shape[1:]
        start, end = self.box[self.part_dim]
        if not self.parts:
            return (((0, end - start), (rows, columns)),)
        ranges: tuple[Range, ...] = ((0, self.shape[self.part_dim]),)
        if self.packing is not None and self.packing.dim == self.part_dim:
            ranges = packed_ranges(self.packing.parts, self.tp)
        borders = (0, *accumulate(self.parts))
        found: list[tuple[Range, tuple[int, int]]] = []
        position = -start
        for first, last in ranges:
            low, high = max(first, first - position), min(last, first - position + end - start)
            while low < high:
                part = bisect_right(borders, low) - 1
                stop, size = min(high, borders[part + 1]), self.parts[part]
                shape = (size, columns) if self.part_dim == 1 else (rows, size)
                begin = found.pop()[0][0] if found and found[-1][1] == shape else position + low - first
                found.append(((begin, position + stop - first), shape))
                low = stop
            position += last - first
        return tuple(found)


class Groups:
    """The process groups of parameters that are split over several mesh axes, each made once. All ranks of a group must ask for it."""

    def __init__(self) -> None:
        self._made: dict[tuple[tuple[int, ...], str | None], ProcessGroup] = {}

    def of(self, ranks: tuple[int, ...], backend: str | None = None) -> ProcessGroup:
        """The group of these ranks, in ascending order, with this backend or the default group's."""
        if (key := (ranks, backend)) not in self._made:
            self._made[key] = dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
        return self._made[key]


def stack_of(
    name: str, parameter: Tensor, packing: Packing | None, tp: int, matrices: MatrixParts | None, groups: Groups
) -> Stack:
    """How a parameter of 2 or 3 dims is shared.

    Args:
        matrices: the matrices in it; None: it is one, or a stack of them.

    Raises:
        ValueError: its shards are not torch's.
    """
    shape = (parameter.shape[0] if parameter.ndim == 3 else 1, parameter.shape[-2], parameter.shape[-1])
    whole: Box = ((0, shape[0]), (0, shape[1]), (0, shape[2]))
    if packing is not None:
        packing = Packing(packing.dim + 3 - parameter.ndim, packing.parts)
    parts, dim = ((), 1) if matrices is None else (matrices.sizes, matrices.dim + 3 - parameter.ndim)
    assert not parts or (dim > 0 and sum(parts) == shape[dim]), (name, matrices)
    if not isinstance(parameter, DTensor):
        return Stack(name, parameter, shape, None, (whole,), 0, packing, tp, parts, dim)
    mesh, coordinate = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert coordinate is not None, name
    split = [(axis, dim + 3 - parameter.ndim) for axis, dim in cuts(parameter)]
    axes = sorted({axis for axis, _ in split if mesh.size(axis) > 1})
    held: dict[int, Box] = {}
    for places in product(*(range(mesh.size(axis)) for axis in axes)):
        at = list(coordinate)
        for axis, place in zip(axes, places, strict=True):
            at[axis] = place
        box = list(whole)
        for axis, cut in split:
            start, end = box[cut]
            chunk = -(-(end - start) // mesh.size(axis))
            box[cut] = (min(start + at[axis] * chunk, end), min(start + (at[axis] + 1) * chunk, end))
        held[int(mesh.mesh[tuple(at)])] = (box[0], box[1], box[2])
    group = None
    if len(axes) == 1:
        group = mesh.get_group(axes[0])
    elif axes:
        group = groups.of(tuple(sorted(held)))
    ranks = dist.get_process_group_ranks(group) if group is not None else [dist.get_rank()]
    boxes = tuple(held[rank] for rank in ranks)
    stack = Stack(name, parameter, shape, group, boxes, ranks.index(dist.get_rank()), packing, tp, parts, dim)
    if (found := tuple(stack.local(parameter).shape)) != tuple(end - start for start, end in stack.box):
        raise ValueError(
            f"{name}: this rank has {found} of {shape}, which is not how torch shards {parameter.placements}: whole matrices are gathered "
            "from the shards of fsdp2 and of tensor parallelism"
        )
    return stack
