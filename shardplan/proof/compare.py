"""The one definition of "equal", and the rows of a proof."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from shardplan.core.report import Compared, Comparison, Verdict
from shardplan.torchlib.complex_numbers import real_parts

from .rank import Left
from .steps import Steps

# Per tensor, the largest difference over the largest reference value. In float32 at most this is equal; above it the
# case runs again in float64, where at most the other is.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-6}
NEGLIGIBLE = 1e-12  # of the model's largest gradient: a reference below it everywhere proves nothing
ALL = "all ranks"
HUGE = 1e20  # masks are filled with the smallest number there is; it is no scale

Ranked = Iterable[tuple[str, Tensor]]  # (the rank in words, the tensor that it has, whole)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """The largest difference over the largest reference value; infinite for another shape, for a value that is not a
    number, and for one that is beyond `HUGE` where the reference is something else."""
    return _error(value, reference, magnitude(reference))


def _error(value: Tensor, reference: Tensor, scale: float) -> float:
    if value.shape != reference.shape or value.is_complex() != reference.is_complex():
        return float("inf")
    value, reference = real_parts(value), real_parts(reference)
    if torch.promote_types(value.dtype, reference.dtype) not in TOLERANCE:
        value, reference = value.double(), reference.double()
    difference = magnitude(value - reference)
    if not (difference < HUGE / 2 and scale < HUGE / 2):  # seldom: something is no number, or as large as a mask's
        if torch.isnan(value).any():
            return float("inf")
        difference, scale = _without_huge(value, reference)
    return difference / scale if scale else (0.0 if difference == 0.0 else float("inf"))


def _without_huge(value: Tensor, reference: Tensor) -> tuple[float, float]:
    """The magnitudes of the difference and of the reference where neither is beyond `HUGE`; infinite, where one alone is."""
    huge = (reference.abs() >= HUGE) | (value.abs() >= HUGE)
    if huge.any():
        smaller = torch.minimum(value[huge].abs(), reference[huge].abs())
        if not torch.equal(value[huge].sign(), reference[huge].sign()) or (smaller < HUGE).any():
            return float("inf"), 1.0
        value, reference = value[~huge], reference[~huge]
    return magnitude(value - reference), magnitude(reference)


def magnitude(tensor: Tensor) -> float:
    """The largest absolute value, not a number where one is none; 0 for an empty tensor."""
    if not tensor.numel():
        return 0.0
    tensor = real_parts(tensor)
    if not tensor.is_floating_point():
        tensor = tensor.double()
    # A norm of order infinity takes 17 times as long, of a million values.
    least, largest = (value.item() for value in torch.aminmax(tensor.detach()))
    return max(abs(least), abs(largest))


def compare(
    name: str, kind: Compared, values: Ranked, reference: Tensor, floor: float = 0.0, alike: str = ""
) -> Comparison:
    """Compare what each rank has with the reference.

    Args:
        values: a tensor that several ranks share is compared once.
        floor: a reference whose largest value is at most this proves nothing, where the values are no larger either than
            rounding could make them.
        alike: what is said in place of a rank where several have the same error.
    """
    dtype = torch.float64 if reference.dtype == torch.float64 else torch.float32
    values, scale = list(values), magnitude(reference)
    distinct = {id(value): value for _, value in values}
    errors = {key: _error(value, reference, scale) for key, value in distinct.items()}
    where, error = max(((rank, errors[id(value)]) for rank, value in values), key=lambda e: e[1])
    if alike and len(values) > 1 and len(set(errors.values())) == 1:
        where = alike
    verdict: Verdict = "equal" if error <= TOLERANCE[dtype] else "differs"
    if floor and scale <= floor:
        rounding = floor / NEGLIGIBLE * TOLERANCE[dtype]
        reduced = all(value.shape == reference.shape and magnitude(value) <= rounding for value in distinct.values())
        verdict = "unproven" if reduced else "differs"
    return Comparison(name, kind, error, where, verdict, str(dtype).removeprefix("torch."))


def compare_steps(reference: Steps, ranks: Mapping[str, Left]) -> tuple[Comparison, ...]:
    """Compare what ranks have with the unsharded steps: every output of each, every gradient, every buffer, whole.

    A tensor that only one of the two models has counts as different.

    Args:
        ranks: what each has, by its name.
    """
    floor = NEGLIGIBLE * max((magnitude(g) for g in reference.gradients.values()), default=0.0)
    rows: list[Comparison] = []
    for i, expected in enumerate(reference.outputs):
        rows += _all("output", expected, {rank: left.outputs[i] for rank, left in ranks.items()})
    rows += _all("gradient", reference.gradients, {rank: left.gradients for rank, left in ranks.items()}, floor)
    rows += _all("buffer", reference.buffers, {rank: left.buffers for rank, left in ranks.items()})
    return worst_of(rows)


def _all(
    kind: Compared, expected: Mapping[str, Tensor], found: Mapping[str, Mapping[str, Tensor]], floor: float = 0.0
) -> list[Comparison]:
    dtypes = {str(value.dtype).removeprefix("torch.") for value in expected.values()}
    dtype = "float64" if "float64" in dtypes else "float32"
    rows = []
    for name in (*expected, *sorted({name for mine in found.values() for name in mine} - expected.keys())):
        apart = [rank for rank, mine in found.items() if (name in mine) != (name in expected)]
        if apart:
            where = ALL if len(apart) == len(found) > 1 else apart[0]
            rows.append(Comparison(name, kind, float("inf"), where, "differs", dtype))
        else:
            values = [(rank, mine[name]) for rank, mine in found.items()]
            rows.append(compare(name, kind, values, expected[name], floor, ALL))
    return rows


def missing_rows(kind: Compared, expected: Mapping[str, Tensor], found: Mapping[str, object]) -> list[Comparison]:
    """A row for each tensor that only one of two models has."""
    dtypes = {str(value.dtype).removeprefix("torch.") for value in expected.values()}
    dtype = "float64" if "float64" in dtypes else "float32"
    return [
        Comparison(name, kind, float("inf"), "every rank", "differs", dtype)
        for name in sorted(expected.keys() ^ found.keys())
    ]


def worst_of(rows: Iterable[Comparison]) -> tuple[Comparison, ...]:
    """The worst of the rows about each tensor."""
    found: dict[tuple[str, str], Comparison] = {}
    for row in rows:
        known = found.get((row.kind, row.name))
        if known is None or _weight(row) > _weight(known):
            found[row.kind, row.name] = row
    return tuple(found.values())


def _weight(row: Comparison) -> tuple[int, float]:
    return (("unproven", "equal", "differs").index(row.verdict), row.error)
