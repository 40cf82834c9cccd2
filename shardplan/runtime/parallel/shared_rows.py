"""Rows of parameters with which several ranks compute: key-value heads, if there are fewer heads than ranks.

Each rank stores its share of them. When they are read, the rows are gathered from the r neighbouring ranks that compute with the
same ones, for all parameters of a block at once. The gradients, partial sums over these ranks, are reduce-scattered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardplan.core.module_program import ParameterProgram

from .collectives import all_gather, reduce_scatter

Pieces = list[list[Tensor]]  # one list for each parameter


def neighbours(mesh: DeviceMesh, copies: int) -> DeviceMesh:
    """This rank and its neighbours that compute with the same rows. Every rank of the axis must call it.

    Args:
        mesh: the tp axis.
        copies: how many ranks these are; it divides the size of the axis.
    """
    if copies == mesh.size():
        return mesh
    first = mesh.get_local_rank() // copies * copies
    members = dist.get_process_group_ranks(mesh.get_group())[first : first + copies]
    group = dist.new_group(members, use_local_synchronization=True)
    return DeviceMesh.from_group(group, mesh.device_type, members, mesh_dim_names=("heads",))


class SharedRows:
    """Shared parameters that are read together.

    Args:
        programs: how each is stored and read.
        stored: this rank's shards. They are kept, so that they can be gathered again.
        groups: number of ranks -> the neighbours.
        ranks: the size of the axis.
    """

    def __init__(
        self,
        programs: Sequence[ParameterProgram],
        stored: Sequence[Tensor],
        groups: Mapping[int, DeviceMesh],
        ranks: int,
    ):
        self.stored, self.groups = [x.detach() for x in stored], groups
        self.dims = [dim for program in programs if (dim := program.dim) is not None]
        assert len(self.dims) == len(programs) and all(program.shared for program in programs), programs
        self.pieces = [p.pieces(ranks, x.shape[d]) for p, x, d in zip(programs, stored, self.dims, strict=True)]

    def gather(self) -> list[Tensor]:
        """The tensors that this rank computes with."""
        found: Pieces = [
            list(x.split([length for length, _ in pieces], dim))
            for x, pieces, dim in zip(self.stored, self.pieces, self.dims, strict=True)
        ]
        for copies, chosen in self._exchanges(found):
            own = [found[i][j] for i, j in chosen]
            rows = all_gather(torch.cat([x.reshape(-1) for x in own]), self.groups[copies], 0).view(copies, -1)
            for (i, j), x, all_ranks in zip(chosen, own, rows.split([x.numel() for x in own], 1), strict=True):
                found[i][j] = torch.cat([one.view(x.shape) for one in all_ranks.unbind()], self.dims[i])
        return self._joined(found)

    def reduce(self, gradients: Sequence[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
        """Sum the partial gradients of the gathered tensors; each rank keeps the sums for the rows that it stores.

        Args:
            dtype: of the reduction; None: the gradients' own.
        """
        found: Pieces = [
            list(x.split([length * copies for length, copies in pieces], dim))
            for x, pieces, dim in zip(gradients, self.pieces, self.dims, strict=True)
        ]
        for copies, chosen in self._exchanges(found):
            shares = [found[i][j].chunk(copies, self.dims[i]) for i, j in chosen]
            flat = torch.cat([torch.stack([x.reshape(-1) for x in share]) for share in shares], 1)
            total = reduce_scatter(flat.to(dtype or flat.dtype), self.groups[copies], 0).to(flat.dtype).view(-1)
            own = total.split([share[0].numel() for share in shares])
            for (i, j), share, x in zip(chosen, shares, own, strict=True):
                found[i][j] = x.view(share[0].shape)
        return self._joined(found)

    def _exchanges(self, found: Pieces) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """The pieces that go over the same ranks in one dtype: (number of ranks, (parameter, piece) of each)."""
        chosen: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
        for i, pieces in enumerate(self.pieces):
            for j, (_, copies) in enumerate(pieces):
                if copies > 1:
                    chosen[copies, str(found[i][j].dtype)].append((i, j))
        for (copies, _), at in sorted(chosen.items()):
            yield copies, at

    def _joined(self, found: Pieces) -> list[Tensor]:
        return [xs[0] if len(xs) == 1 else torch.cat(xs, dim) for xs, dim in zip(found, self.dims, strict=True)]
