"""The type of a value: how it is spread over the ranks, and what its gradient is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardplan.core.layout import Layout
from shardplan.core.module_program import ParameterProgram

from .spread import SUM, WHOLE, Order, Spread, SpreadKind, chunk, neighbours

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


def read_order(parameter: ParameterProgram, size: int, ranks: int) -> Order | None:
    """For each rank, the indices along its split dim that it computes with; None where these are its ceil-chunk.

    Args:
        size: the length of the dim.
    """
    copies = parameter.copies or (parameter.computed.copies,)
    if not parameter.parts and copies == (1,):
        return None
    own = (parameter.ranges(size, ranks, rank) for rank in range(ranks))
    return tuple(tuple(i for start, length in ranges for i in range(start, start + length)) for ranges in own)


def rows_order(batch: int, length: int, ranks: int) -> Order:
    """For each rank, its rows of [batch * length, ...], where it has a slice of each sequence of the batch."""
    slices = (chunk(length, ranks, rank) for rank in range(ranks))
    return tuple(
        tuple(one * length + at for one in range(batch) for at in range(start, start + n)) for start, n in slices
    )


def shared_order(found: Spread, copies: int, ranks: int) -> Order:
    """For each rank, its indices along the split dim of `found` if each slice were on `copies` neighbouring ranks."""
    size = 1 + max((index for indices in found.order or () for index in indices), default=-1)
    return neighbours(size * copies // ranks, copies, ranks)


def same_order(found: Order | None, expected: Order | None, ranks: int) -> bool:
    """Whether two orders are equal; None is the order of the ceil-chunks."""
    known = found or expected
    if known is None:
        return True
    chunks = rows_order(1, 1 + max(max(indices, default=-1) for indices in known), ranks)
    return (found or chunks) == (expected or chunks)
