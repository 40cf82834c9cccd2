"""The order of rows in packed parameters: every rank's slice holds its share of each part.

`_StridedShard` cannot express this for parts of different sizes (q, k and v with grouped heads). Where FSDP shards the
same dim, its `full_tensor()` returns permuted rows. So the rows are permuted before a plain Shard. The
permutation depends on tp; it is undone when a checkpoint is written, and redone when one is read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def packed_order(parts: tuple[int, ...], ranks: int) -> Tensor:
    """The permutation: position in the packed dim -> index in the original, int64 of sum(parts).

    Rank r's slice is the concatenation over parts of the part's r-th chunk. `ranks` must divide every part.
    """
    assert all(size % ranks == 0 for size in parts), (parts, ranks)
    index, offset = [], 0
    for size in parts:
        index.append(torch.arange(offset, offset + size).view(ranks, size // ranks))
        offset += size
    return torch.cat(index, dim=1).reshape(-1)


def packed_ranges(parts: Sequence[int], ranks: int) -> tuple[tuple[int, int], ...]:
    """The packed order as ranges [start, stop) of the original: for each rank, its share of each part. None is empty."""
    starts = [sum(parts[:i]) for i in range(len(parts))]
    shares = [
        (start + rank * size // ranks, start + (rank + 1) * size // ranks)
        for rank in range(ranks)
        for start, size in zip(starts, parts, strict=True)
    ]
    return tuple(share for share in shares if share[0] < share[1])


def pack(x: Tensor, dim: int, parts: tuple[int, ...], ranks: int) -> Tensor:
    """The whole tensor with its packed dim in the order that a plain Shard splits correctly."""
    assert x.shape[dim] == sum(parts), (tuple(x.shape), dim, parts)
    return x if x.is_meta else x.index_select(dim, packed_order(parts, ranks).to(x.device))


def unpack(x: Tensor, dim: int, parts: tuple[int, ...], ranks: int) -> Tensor:
    """The inverse of `pack`."""
    assert x.shape[dim] == sum(parts), (tuple(x.shape), dim, parts)
    return x if x.is_meta else x.index_select(dim, torch.argsort(packed_order(parts, ranks)).to(x.device))
