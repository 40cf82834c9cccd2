"""The type of a value: how it is spread over the ranks, and what its gradient is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardplan.core.layout import Layout
from shardplan.core.module_program import ParameterProgram

from .spread import SUM, WHOLE, Spread, SpreadKind, chunk

TypeKind = Literal["I", "R", "V", "P", "whole", "tail", "?"]
KINDS: Mapping[SpreadKind, TypeKind] = {"whole": "whole", "split": "V", "sum": "P"}


@dataclass(frozen=True, slots=True)
class Type:
    """The type of a value.

    Args:
        kind: I, R, V, P; "whole": no gradient that could be partial; "tail": I, except for its last features, which are
            R; "?": not compared.
        spread: how it is spread.
        sources: for a value that was not compared, those that it was computed from.
        tail: the number of its last features that are R.
    """

    kind: TypeKind
    spread: Spread = WHOLE
    sources: frozenset[int] = frozenset()
    tail: int = 0

    def describe(self, ndim: int) -> str:
        if self.kind == "V":
            dim = self.spread.dim
            assert dim is not None
            name = f"V({dim},{dim + 1})" if self.spread.joined else f"V({dim - ndim if dim == ndim - 1 else dim})"
            if self.spread.copies > 1:
                return f"{name}/{self.spread.copies}"
            return f"{name} in packed parts" if self.spread.order else name
        return {"tail": f"I, its last {self.tail} features R"}.get(self.kind, self.kind)


FREE = Type("whole")


def declared(layout: Layout, ndim: int) -> Type:
    """The type that a style's record declares for a value with `ndim` dims."""
    if layout.kind == "V":
        return Type("V", Spread("split", layout.split_dim(ndim)))
    return Type(layout.kind, SUM if layout.kind == "P" else WHOLE)


def read_order(parameter: ParameterProgram, size: int, ranks: int) -> tuple[tuple[int, ...], ...] | None:
    """For each rank, the indices along its split dim that it computes with; None where these are its ceil-chunk.

    Args:
        size: the length of the dim.
    """
    copies = parameter.copies or (parameter.computed.copies,)
    if not parameter.parts and copies == (1,):
        return None
    own = (parameter.ranges(size, ranks, rank) for rank in range(ranks))
    return tuple(tuple(i for start, length in ranges for i in range(start, start + length)) for ranges in own)


def rows_order(batch: int, length: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    """For each rank, its rows of [batch * length, ...], where it has a slice of each sequence of the batch."""
    slices = (chunk(length, ranks, rank) for rank in range(ranks))
    return tuple(
        tuple(one * length + at for one in range(batch) for at in range(start, start + n)) for start, n in slices
    )


def shared_order(found: Spread, copies: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    """For each rank, its indices along the split dim of `found` if each slice were on `copies` neighbouring ranks."""
    size = 1 + max((index for indices in found.order or () for index in indices), default=-1)
    length = size * copies // ranks
    starts = [rank // copies * length for rank in range(ranks)]
    return tuple(tuple(range(start, start + length)) for start in starts)


def same_order(
    found: tuple[tuple[int, ...], ...] | None, expected: tuple[tuple[int, ...], ...] | None, ranks: int
) -> bool:
    if found is None and expected is None:
        return True
    return _explicit(found, expected, ranks) == _explicit(expected, found, ranks)


def _explicit(
    order: tuple[tuple[int, ...], ...] | None, other: tuple[tuple[int, ...], ...] | None, ranks: int
) -> tuple[tuple[int, ...], ...]:
    if order is not None:
        return order
    assert other is not None  # one of the two is not the ceil-chunks
    size = 1 + max(max(indices, default=-1) for indices in other)
    return tuple(tuple(range(start, start + length)) for start, length in (chunk(size, ranks, r) for r in range(ranks)))
