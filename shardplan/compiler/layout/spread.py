"""How a value is spread over the ranks, found by comparing every rank's value with the unsharded model's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from shardplan.core.by_key import by_key
from shardplan.core.search_bounds import BOUNDS
from shardplan.torchlib.complex_numbers import real_parts

# In float32, relative to the largest reference value: above the noise of sums in another order, far below any wrong
# value.
TOLERANCE = 1e-4
HALF = (torch.bfloat16, torch.float16)
HUGE = 1e20  # masks are filled with the smallest number there is; it sets no scale


Order = tuple[tuple[int, ...], ...]  # for each rank, the indices that it has
SpreadKind = Literal["whole", "split", "sum"]


@dataclass(frozen=True, slots=True)
class Spread:
    """How a value is spread.

    Args:
        kind: "whole" (equal on all ranks), "split", "sum" (the ranks' values add up to the value).
        dim: the dim that is split.
        order: for each rank, the indices that it has along `dim`; None where these are its ceil-chunk. The gradient of
            an index that several ranks have is a partial sum over them.
        joined: whether `dim` and the next dim, taken as one, are split (heads by groups, where a rank has a part of a group).
        empty: whether whole and sum look alike, as the value is zero everywhere or has no elements.
    """

    kind: SpreadKind
    dim: int | None = None
    order: Order | None = None
    joined: bool = False
    empty: bool = False

    @property
    def copies(self) -> int:
        """The number of ranks that have each index."""
        return max(Counter(chain.from_iterable(self.order)).values(), default=1) if self.order else 1


WHOLE = Spread("whole")
SUM = Spread("sum")


def scale(reference: Tensor) -> float:
    """The largest absolute value, without masks."""
    if not reference.numel():
        return 0.0
    if not reference.is_floating_point():
        return float(reference.abs().max()) if reference.dtype != torch.bool else 1.0
    largest = float(reference.abs().max())
    if largest < HUGE:
        return largest
    finite = torch.nan_to_num(reference, nan=0.0, posinf=0.0, neginf=0.0).abs()
    return float(torch.where(finite < HUGE, finite, 0.0).max())


def close(value: Tensor, reference: Tensor, tolerance: float) -> bool:
    """Whether two tensors of one shape are equal up to noise."""
    if value.dtype == reference.dtype and torch.equal(value, reference):  # nearly all are: a hundredth of the time
        return True
    value, reference = real_parts(value), real_parts(reference)
    if not reference.is_floating_point():
        return bool((value == reference).all())
    return torch.allclose(value, reference.to(value.dtype), rtol=TOLERANCE, atol=tolerance, equal_nan=True)


def same(value: Tensor, reference: Tensor, rounding: float = 0.0) -> bool:
    """Whether a rank's tensor is the unsharded model's, up to noise."""
    alike = value.shape == reference.shape and value.dtype == reference.dtype
    return alike and (torch.equal(value, reference) or close(value, reference, _tolerance(reference, 0.0, rounding)))


def chunk(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Start and length of a rank's ceil-chunk."""
    length = -(-size // ranks)
    start = min(rank * length, size)
    return start, min(length, size - start)


def spread_of(
    locals_: Sequence[Tensor],
    reference: Tensor,
    noise: float = 0.0,
    rounding: float = 0.0,
    orders: Collection[Order] = (),
) -> Spread | None:
    """How the ranks' tensors make up the reference; None where they do not.

    Args:
        locals_: the tensor of each rank.
        reference: the unsharded model's.
        noise: the largest operand; its rounding error remains in the result.
        rounding: the relative rounding of the operations that the value comes from, where these are in half precision.
        orders: those found for other values, with each index on one rank. To recognise one is faster than to find it.
    """
    if any(x.ndim != reference.ndim or x.dtype != reference.dtype for x in locals_):
        return None
    locals_, reference = [real_parts(x) for x in locals_], real_parts(reference)  # as one more dim, the last
    if all(x.shape == reference.shape for x in locals_):
        return _unsplit(locals_, reference, noise, rounding)
    differing = {d for x in locals_ for d in range(x.ndim) if x.shape[d] != reference.shape[d]}
    dim = min(differing)
    if differing == {dim, dim + 1}:
        flat = [x.flatten(dim, dim + 1) for x in locals_]
        found = spread_of(flat, reference.flatten(dim, dim + 1), noise, rounding, orders)
        return found and replace(found, joined=True)
    if len(differing) != 1:
        return None
    total, size = sum(x.shape[dim] for x in locals_), reference.shape[dim]
    if total < size:
        return None
    tolerance = _tolerance(reference, noise, rounding)
    if total > size:
        return _shared(locals_, reference, dim, tolerance)
    return _split(locals_, reference, dim, tolerance, orders)


def _tolerance(reference: Tensor, noise: float, rounding: float) -> float:
    """The tolerance as an absolute difference. In half precision the ranks' values are rounded several times, each differently."""
    return max(TOLERANCE, 8 * rounding) * scale(reference) + max(1e-6, 8 * rounding) * noise


def _unsplit(locals_: Sequence[Tensor], reference: Tensor, noise: float, rounding: float) -> Spread | None:
    if all(torch.equal(x, reference) for x in locals_):
        zero = reference.is_floating_point() and not bool(reference.any())
        return Spread("whole", empty=zero or not reference.numel())
    tolerance = _tolerance(reference, noise, rounding)
    if all(close(x, reference, tolerance) for x in locals_):
        return Spread("whole", empty=scale(reference) == 0.0)
    if reference.is_floating_point() and close(_sum(locals_), reference, tolerance):
        return SUM
    return None


def _sum(locals_: Sequence[Tensor]) -> Tensor:
    if locals_[0].dtype in HALF:
        return sum((x.float() for x in locals_[1:]), locals_[0].float()).to(locals_[0].dtype)
    return sum(locals_[1:], locals_[0])


def _split(
    locals_: Sequence[Tensor], reference: Tensor, dim: int, tolerance: float, orders: Collection[Order]
) -> Spread | None:
    ranks, size = len(locals_), reference.shape[dim]
    chunks = [chunk(size, ranks, rank) for rank in range(ranks)]
    if all(x.shape[dim] == length for x, (_, length) in zip(locals_, chunks, strict=True)) and all(
        close(x, reference.narrow(dim, start, length), tolerance)
        for x, (start, length) in zip(locals_, chunks, strict=True)
    ):
        return Spread("split", dim)
    lengths = [x.shape[dim] for x in locals_]
    for known in orders:
        if [*map(len, known)] == lengths and all(
            close(x, reference.index_select(dim, torch.tensor(indices, dtype=torch.long)), tolerance)
            for x, indices in zip(locals_, known, strict=True)
        ):
            return Spread("split", dim, known)
    order: list[tuple[int, ...]] = []
    for x in locals_:
        indices = indices_of(x, reference, dim, tolerance)
        if indices is None:
            return None
        order.append(indices)
    if sorted(i for indices in order for i in indices) == list(range(size)):
        return Spread("split", dim, tuple(order))
    apart = _among_equals(order, reference, dim, tolerance)
    return None if apart is None else Spread("split", dim, tuple(apart))


def _shared(locals_: Sequence[Tensor], reference: Tensor, dim: int, tolerance: float) -> Spread | None:
    """The spread of slices that several ranks have, neighbours or others; None if the values are no such slices."""
    ranks, size, length = len(locals_), reference.shape[dim], locals_[0].shape[dim]
    if length and size % length == 0 and ranks % (size // length) == 0 and len({x.shape for x in locals_}) == 1:
        known = neighbours(length, ranks * length // size, ranks)
        if all(
            close(x, reference.narrow(dim, indices[0], length), tolerance)
            for x, indices in zip(locals_, known, strict=True)
        ):
            return Spread("split", dim, known)
    order = [indices_of(x, reference, dim, tolerance) for x in locals_]
    first = indices_of(reference, reference, dim, tolerance)
    found = [indices for indices in order if indices is not None]
    if first is None or len(found) < ranks or {first[i] for indices in found for i in indices} != set(first):
        return None
    return Spread("split", dim, tuple(found))


def neighbours(length: int, copies: int, ranks: int) -> Order:
    """The order in which each slice of a length is on several ranks, one next to the other."""
    starts = (rank // copies * length for rank in range(ranks))
    return tuple(tuple(range(start, start + length)) for start in starts)


def _among_equals(
    order: Sequence[tuple[int, ...]], reference: Tensor, dim: int, tolerance: float
) -> list[tuple[int, ...]] | None:
    """The order with each index once. Equal slices (repeated heads) cannot be told apart, so their indices are given
    out in turn; None if their numbers differ."""
    first = indices_of(reference, reference, dim, tolerance)
    if first is None:
        return None
    alike = by_key((one, index) for index, one in enumerate(first))
    left = {one: iter(indices) for one, indices in alike.items()}
    result = [tuple(next(left[first[i]], -1) for i in indices) for indices in order]
    return result if sorted(i for indices in result for i in indices) == list(range(len(first))) else None


def indices_of(value: Tensor, reference: Tensor, dim: int, tolerance: float) -> tuple[int, ...] | None:
    """The slices of the reference along `dim` that the value consists of, in order."""
    if not reference.is_floating_point():
        value, reference = value.double(), reference.double()
    rows, columns = (torch.nan_to_num(x.movedim(dim, 0).unsqueeze(-1).flatten(1)) for x in (value, reference))
    if not columns.numel():
        return None
    if not rows.numel():
        return ()
    pairs = rows.shape[0] * columns.shape[0]
    samples = min(64, max(4, BOUNDS.compared // pairs))  # enough elements to tell one slice from another
    step = max(1, rows.shape[1] // samples)
    wide = torch.promote_types(rows.dtype, torch.float32)  # cdist takes no half precision
    few, among = rows[:, ::step].to(wide), columns[:, ::step].to(wide)
    parts = few.split(max(1, BOUNDS.compared // among.shape[0]))  # a table of 2^18 rows has 2^36 pairs
    nearest = torch.cat([torch.cdist(part, among, p=math.inf).argmin(1) for part in parts])
    if not close(rows, columns[nearest], tolerance):
        return None
    return tuple(nearest.tolist())
