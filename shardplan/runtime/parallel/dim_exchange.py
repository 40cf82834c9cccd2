"""Exchange a slice of one dim for a slice of another: every rank sends each other rank that rank's part of the new dim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardplan.core.moves import Ranges, length_of

from .collectives import all_to_all


@dataclass(frozen=True, slots=True)
class Cut:
    """A dim, and each rank's part of it when it is split.

    Args:
        dim: the dim's index, from 0.
        size: of the whole dim.
        shares: each rank's indices. Several ranks may have the same ones.
    """

    dim: int
    size: int
    shares: tuple[Ranges, ...]

    @property
    def in_order(self) -> bool:
        """Whether the ranks' parts, concatenated in rank order, are the whole dim."""
        end = 0
        for start, length in (one for ranges in self.shares for one in ranges):
            if start != end:
                return False
            end += length
        return end == self.size

    def take(self, x: Tensor, rank: int) -> Tensor:
        """A rank's part of the whole tensor."""
        return pieces_of(x, self.dim, self.shares[rank])

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor, from the parts of all ranks. Indices that several ranks have are summed."""
        if self.in_order:
            return _joined(parts, self.dim)
        shape = list(parts[0].shape)
        shape[self.dim] = self.size
        whole = parts[0].new_zeros(shape)
        for ranges, part in zip(self.shares, parts, strict=True):
            pieces = part.split([length for _, length in ranges], self.dim)
            for (start, length), piece in zip(ranges, pieces, strict=True):
                whole.narrow(self.dim, start, length).add_(piece)
        return whole


def exchange_dims(x: Tensor, mesh: DeviceMesh, had: Cut, wanted: Cut) -> Tensor:
    """Exchange this rank's share of one dim, with all of the other dim, for its share of the other. The gradient goes the reverse
    way; indices that several ranks have are summed there."""
    ranks, own = mesh.size(), mesh.get_local_rank()
    sent = [wanted.take(x, rank) for rank in range(ranks)]
    shape = list(sent[own].shape)
    shapes = []
    for ranges in had.shares:
        shape[had.dim] = length_of(ranges)
        shapes.append(tuple(shape))
    sizes = [torch.Size(one).numel() for one in shapes]
    flat = all_to_all(torch.cat([one.reshape(-1) for one in sent]), sizes, [one.numel() for one in sent], mesh)
    return had.whole([part.view(one) for part, one in zip(flat.split(sizes), shapes, strict=True)])


def pieces_of(x: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """The given ranges of a dim, concatenated."""
    return _joined([x.narrow(dim, *one) for one in ranges], dim)


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
