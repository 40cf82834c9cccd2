"""The bytes that a refit will send, computed from two models without memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import torch
from torch import nn

from .slices_sent import Unit, sent_by_pairs, unit_of
from .stored_parts import ranges_of
from .whole_tensors import Described, Want, merged, numbers_of, stored_parts


def of_every_rank(model: nn.Module, ranks: int) -> list[list[Described]]:
    """What each rank of a job holds of a planned model on the meta device, computed from the plan on one rank."""
    (part,) = stored_parts(model)
    return [
        [(e.names, tuple(e.tensor.shape), e.tensor.dtype, ranges_of(e, part.packed, rank)) for e in part.entries]
        for rank in range(ranks)
    ]


def refit_bytes(
    trainer: Sequence[Sequence[Described]], engine: Sequence[Sequence[Described]], first: int, dtype: torch.dtype
) -> Mapping[tuple[int, int], int]:
    """(source, destination) -> bytes of a refit between models of one class.

    Args:
        first: the rank in the job of the engine's first rank; the trainer's first is rank 0.
        dtype: the engine's floating-point dtype.
    """
    wholes = merged(trainer)
    number = numbers_of(wholes)
    asked: dict[int, list[Unit]] = {}
    for rank, rows in enumerate(engine, first):
        wants = [
            Want(number[names[0]], box, dtype if own.is_floating_point else own)
            for names, _, own, ranges in rows
            for box in product(*ranges)
        ]
        asked[rank] = [unit_of([want], wholes, rank, rank + i) for i, want in enumerate(dict.fromkeys(wants))]
    return sent_by_pairs(asked)
