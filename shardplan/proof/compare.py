"""The one definition of "equal", and the rows of a proof."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from shardplan.core.report import Compared, Comparison, Verdict

from .steps import Steps

# Per tensor, the largest difference over the largest reference value. In float32 at most this is equal; above it the
# case runs again in float64, where at most the other is.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-6}
NEGLIGIBLE = 1e-12  # of the model's largest gradient: a reference below it everywhere proves nothing
HUGE = 1e20  # masks are filled with the smallest number there is; it is no scale

Ranked = Iterable[tuple[str, Tensor]]  # (the rank in words, the tensor that it has, whole)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """The largest difference over the largest reference value; infinite for another shape, for a value that is not a
    number, and for one that is beyond `HUGE` where the reference is something else."""
    if value.shape != reference.shape:
        return float("inf")
    value, reference = value.double(), reference.double()
    difference, scale = magnitude(value - reference), magnitude(reference)
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
    if not tensor.is_floating_point():
        tensor = tensor.double()
    return torch.linalg.vector_norm(tensor.detach(), float("inf")).item()


def compare(name: str, kind: Compared, values: Ranked, reference: Tensor, floor: float = 0.0) -> Comparison:
    """Compare what each rank has with the reference.

    Args:
        floor: a reference whose largest value is at most this proves nothing, where the values are no larger either than
            rounding could make them.
    """
    dtype = torch.float64 if reference.dtype == torch.float64 else torch.float32
    values = list(values)
    where, error = max(((rank, relative_error(value, reference)) for rank, value in values), key=lambda e: e[1])
    verdict: Verdict = "equal" if error <= TOLERANCE[dtype] else "differs"
    if floor and magnitude(reference) <= floor:
        rounding = floor / NEGLIGIBLE * TOLERANCE[dtype]
        reduced = all(value.shape == reference.shape and magnitude(value) <= rounding for _, value in values)
        verdict = "unproven" if reduced else "differs"
    return Comparison(name, kind, error, where, verdict, str(dtype).removeprefix("torch."))


def compare_steps(
    reference: Steps,
    outputs: Sequence[Mapping[str, Tensor]],
    gradients: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
) -> tuple[Comparison, ...]:
    """Compare one rank's steps with the unsharded ones: every output of each, every gradient, every buffer, whole.

    A tensor that only one of the two models has counts as different.
    """
    floor = NEGLIGIBLE * max((magnitude(g) for g in reference.gradients.values()), default=0.0)
    rows: list[Comparison] = []
    for expected, found in zip(reference.outputs, outputs, strict=True):
        rows += _all("output", expected, found)
    rows += _all("gradient", reference.gradients, gradients, floor)
    rows += _all("buffer", reference.buffers, buffers)
    return worst_of(rows)


def _all(
    kind: Compared, expected: Mapping[str, Tensor], found: Mapping[str, Tensor], floor: float = 0.0
) -> list[Comparison]:
    rows = [compare(name, kind, [("", found[name])], value, floor) for name, value in expected.items() if name in found]
    return [*rows, *missing_rows(kind, expected, found)]


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
