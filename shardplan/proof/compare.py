"""The rows of a proof."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from shardplan.core.report import Compared, Comparison, Verdict
from shardplan.torchlib.equality import TOLERANCE, magnitude, relative_error

from .rank import Left
from .steps import Steps
from .wrong_forms import form_of

NEGLIGIBLE = 1e-12  # x the model's largest gradient: a reference that is smaller everywhere proves nothing
ALL = "all ranks"

Ranked = Iterable[tuple[str, Tensor]]  # (the rank in words, its tensor, whole)


def compare(
    name: str, kind: Compared, values: Ranked, reference: Tensor, floor: float = 0.0, alike: str = ""
) -> Comparison:
    """Compare the values of all ranks with the reference.

    Args:
        values: a tensor that several ranks share is compared once.
        floor: a reference with a largest value of at most this proves nothing, if the values are also no larger than
            rounding could make them.
        alike: the text instead of a rank, where several ranks have the same error.
    """
    dtype = torch.float64 if reference.dtype == torch.float64 else torch.float32
    values, scale = list(values), magnitude(reference)
    distinct = {id(value): value for _, value in values}
    errors = {key: relative_error(value, reference, scale) for key, value in distinct.items()}
    where, error = max(((rank, errors[id(value)]) for rank, value in values), key=lambda e: e[1])
    if alike and len(values) > 1 and len(set(errors.values())) == 1:
        where = alike
    verdict: Verdict = "equal" if error <= TOLERANCE[dtype] else "differs"
    if floor and scale <= floor:
        rounding = floor / NEGLIGIBLE * TOLERANCE[dtype]
        reduced = all(value.shape == reference.shape and magnitude(value) <= rounding for value in distinct.values())
        verdict = "unproven" if reduced else "differs"
    form = form_of([*distinct.values()], reference) if verdict == "differs" else ""
    return Comparison(name, kind, error, where, verdict, str(dtype).removeprefix("torch."), form)


def compare_steps(reference: Steps, ranks: Mapping[str, Left]) -> tuple[Comparison, ...]:
    """Compare the ranks' results with the unsharded steps: every output of each step, every gradient, every buffer, and every
    parameter that a forward changed, whole.

    A tensor that only one of the two models has counts as different.

    Args:
        ranks: rank, by name -> its results.
    """
    floor = NEGLIGIBLE * max((magnitude(g) for g in reference.gradients.values()), default=0.0)
    rows: list[Comparison] = []
    for i, expected in enumerate(reference.outputs):
        rows += _all("output", expected, {rank: left.outputs[i] for rank, left in ranks.items()})
    rows += _all("gradient", reference.gradients, {rank: left.gradients for rank, left in ranks.items()}, floor)
    rows += _all("buffer", reference.buffers, {rank: left.buffers for rank, left in ranks.items()})
    changed = {name for left in ranks.values() for name in left.parameters}
    parameters = {name: value for name, value in reference.parameters.items() if name in changed}
    rows += _all("parameter", parameters, {rank: left.parameters for rank, left in ranks.items()})
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


def worst_of(rows: Iterable[Comparison]) -> tuple[Comparison, ...]:
    """The worst row for each tensor."""
    found: dict[tuple[str, str], Comparison] = {}
    for row in rows:
        known = found.get((row.kind, row.name))
        if known is None or _weight(row) > _weight(known):
            found[row.kind, row.name] = row
    return tuple(found.values())


def _weight(row: Comparison) -> tuple[int, float]:
    return (("unproven", "equal", "differs").index(row.verdict), row.error)
