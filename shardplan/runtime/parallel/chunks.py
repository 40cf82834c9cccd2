"""The one formula for how a dimension is cut over ranks: ceil-chunks, as DTensor's Shard cuts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardplan.torchlib.private import private


def chunk_size(size: int, ranks: int) -> int:
    """The size of every rank's chunk except the last ones': ceil(size / ranks)."""
    return -(-size // ranks)


class UnevenSequence(ValueError):
    """A sequence that the ranks do not divide."""


def uneven(size: int, dim: int, ranks: int) -> UnevenSequence:
    """The error for a sequence that the tp axis does not divide: it says what to pad, and what else to call."""
    return UnevenSequence(
        f"dim {dim} has {size} elements, which tp={ranks} does not divide: pad it to {chunk_size(size, ranks) * ranks} "
        f"(sequence parallelism splits the sequence evenly). `shardplan.pad_to_multiple(batch, {ranks}, pad_token_id=...)` pads "
        "input_ids, attention_mask and labels; `with shardplan.without_sequence_parallel(model):` runs any length"
    )


def _take(x: Tensor, dim: int, chunk: int, rank: int) -> Tensor:
    start = min(rank * chunk, x.shape[dim])
    return x.narrow(dim, start, min(chunk, x.shape[dim] - start))


_take_per_rank = private("run_per_rank")(_take)


def own_chunk(x: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """This rank's ceil-chunk of a whole tensor along `dim`, a view; the last ranks' may be shorter or empty."""
    chunk = chunk_size(x.shape[dim], mesh.size())
    if x.shape[dim] % mesh.size() == 0:
        return x.narrow(dim, mesh.get_local_rank() * chunk, chunk)
    return _take_per_rank(x, dim, chunk, mesh.get_local_rank())


def pad_chunk(x: Tensor, dim: int, chunk: int) -> Tensor:
    """The chunk with zeros appended along `dim` up to `chunk`."""
    return _pad_per_rank(x, dim, chunk)


def _pad(x: Tensor, dim: int, chunk: int) -> Tensor:
    missing = chunk - x.shape[dim]
    if missing == 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


_pad_per_rank = private("run_per_rank")(_pad)
