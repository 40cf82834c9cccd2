"""Logits that may be split over the vocabulary: the columns of this rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from .chunks import chunk_size as ceil_chunk
from .collectives import all_reduce
from .process_groups import Group

IGNORE_INDEX = -100


@dataclass(frozen=True, slots=True)
class Split:
    """How a vocabulary is split.

    Args:
        size: the size of the whole vocabulary.
        first: the token id of this rank's first column.
        group: the ranks over which it is split, in ceil-chunks; None where every rank has it whole.
    """

    size: int
    first: int
    group: Group | None

    def reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """The sum (or `op`) over the ranks."""
        return x if self.group is None else all_reduce(x, self.group, op)

    def locate(self, ids: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """(the column of each token id, 0 for another rank's id; whether it is another rank's)."""
        column = ids - self.first
        on_other_rank = (column < 0) | (column >= columns)
        return column.masked_fill(on_other_rank, 0), on_other_rank


def is_split(logits: Tensor) -> TypeGuard[DTensor]:
    """Whether logits are a DTensor that is split over the vocabulary.

    Raises:
        TypeError: a DTensor that is neither split over the vocabulary nor whole, or on a mesh of several dimensions.
    """
    if not isinstance(logits, DTensor):
        return False
    if logits.device_mesh.ndim != 1:
        raise TypeError("logits must be a DTensor on a one-dimensional mesh")
    (placement,) = logits.placements
    if placement not in (Shard(-1), Shard(logits.ndim - 1), Replicate()):
        raise TypeError(f"logits must be split over the vocabulary (Shard(-1)) or whole, not {placement}")
    return placement != Replicate()


def read_logits(logits: Tensor, group: Group | None = None, vocab_size: int | None = None) -> tuple[Tensor, Split]:
    """This rank's columns [..., tokens, columns], and how the vocabulary is split.

    Args:
        logits: [..., tokens, vocabulary], a DTensor Shard(-1) or Replicate or a plain tensor; with a group, a plain
            tensor of this rank's columns.
        group: the process group, or the one-dimensional mesh, over which the columns are split in ceil-chunks.
        vocab_size: the size of the whole vocabulary; needed with a group, else checked where it is given.

    Raises:
        TypeError: a DTensor with another split, or a DTensor together with a group.
        ValueError: sizes do not fit, or are missing.
    """
    if logits.ndim < 2:
        raise ValueError(f"logits must be [..., tokens, vocabulary], not of shape {tuple(logits.shape)}")
    if group is None:
        size = logits.shape[-1]
        if vocab_size not in (None, size):
            raise ValueError(
                f"the logits have {size} columns, but vocab_size is {vocab_size}: for this rank's slice of split logits, "
                "pass group= too"
            )
        if not is_split(logits):
            return logits.to_local() if isinstance(logits, DTensor) else logits, Split(size, 0, None)
        mesh = logits.device_mesh
        return logits.to_local(), Split(size, mesh.get_local_rank() * ceil_chunk(size, mesh.size()), mesh)
    if isinstance(logits, DTensor):
        raise TypeError("logits are a DTensor and have a group: remove group=")
    return logits, split_over(group, vocab_size, logits.shape[-1])


def split_over(group: Group, vocab_size: int | None, columns: int) -> Split:
    """The split of a vocabulary over a group, if this rank has this many columns.

    Raises:
        ValueError: as `read_logits`.
    """
    if isinstance(group, DeviceMesh) and group.ndim != 1:
        raise ValueError(f"group must have one dimension, not {group.ndim}: pass mesh['tp']")
    if vocab_size is None:
        raise ValueError("group= needs vocab_size=: the slices of the ranks may differ in size")
    rank = group.get_local_rank() if isinstance(group, DeviceMesh) else dist.get_rank(group)
    chunk = ceil_chunk(vocab_size, group.size())
    expected = min(chunk, max(0, vocab_size - rank * chunk))
    if columns != expected:
        raise ValueError(
            f"rank {rank} of {group.size()} must have {expected} columns of a vocabulary of {vocab_size} "
            f"(ceil-chunks), not {columns}"
        )
    return Split(vocab_size, rank * chunk, group)


def read_temperature(temperature: float) -> float:
    """Raise ValueError unless the temperature is above 0."""
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, not {temperature}")
    return float(temperature)


def read_chunk(chunk_size: int | None, tokens: int) -> int:
    """The tokens of a chunk; None: all of them.

    Raises:
        ValueError: it is not a positive number.
    """
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, not {chunk_size}")
    return chunk_size or max(tokens, 1)
