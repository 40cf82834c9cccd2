"""A wrong tensor in words: by how much it differs, and how it comes from the right one, which tells a missing or a second reduction from
other mistakes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardplan.compiler.layout.spread import SUM, indices_of, spread_of
from shardplan.core.search_bounds import BOUNDS
from shardplan.torchlib.equality import TOLERANCE, magnitude, relative_error


def form_of(values: Sequence[Tensor], reference: Tensor) -> str:
    """The form of a wrong tensor, in words; "" where none of them explains it.

    Args:
        values: the different tensors that ranks have.
        reference: the unsharded model's, in float32 or float64.
    """
    if not reference.is_floating_point() or any(value.shape != reference.shape for value in values):
        return ""
    if len(values) > 1 and spread_of(values, reference) == SUM:
        return "a partial sum: those of the ranks add up to the right one"
    if not any(value.any() for value in values):
        return "zero"
    squares = float(torch.linalg.vector_norm(reference)) ** 2
    times = float((values[0] * reference).sum()) / squares if squares else 0.0
    if times and all(relative_error(value, times * reference) <= TOLERANCE[reference.dtype] for value in values):
        return f"{times:.3g} times the right one"
    tolerance = TOLERANCE[reference.dtype] * magnitude(reference)
    few = [dim for dim in range(min(2, reference.ndim)) if reference.shape[dim] ** 2 <= BOUNDS.compared]
    for dim in few:
        orders = [indices_of(value, reference, dim, tolerance) for value in values]
        if all(order is not None and sorted(order) == list(range(reference.shape[dim])) for order in orders):
            return f"the right one with its slices along dim {dim} in another order"
    return ""


def amount_of(error: float) -> str:
    """The error of a wrong tensor (`relative_error`)."""
    return "of another shape, missing or not finite" if math.isinf(error) else f"{error:.1e} of its largest value"
