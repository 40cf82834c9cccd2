"""A slice of one dim for a slice of another: every rank sends each other rank what that has of the new dim."""

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
    """A dim, and what each rank has of it where it is split.

    Args:
        dim: from 0.
        size: of the whole.
        shares: by rank. A place may be on several ranks.
    """

    dim: int
    size: int
    shares: tuple[Ranges, ...]

    @property
    def in_order(self) -> bool:
        """Whether what the ranks have, one behind the other, is the whole."""
        end = 0
        for start, length in (one for ranges in self.shares for one in ranges):
            if start != end:
                return False
            end += length
        return end == self.size

    def take(self, x: Tensor, rank: int) -> Tensor:
        """What a rank has of the whole."""
        return pieces_of(x, self.dim, self.shares[rank])

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """What all ranks have, as the whole; what several have of one place is added up."""
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
    """From a rank's share of one dim, whole in the other, to its share of the other. The gradient goes the same way back, where
    what several ranks had of one place is added up."""
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
    """What of a dim these places have, one behind the other."""
    return _joined([x.narrow(dim, *one) for one in ranges], dim)


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
