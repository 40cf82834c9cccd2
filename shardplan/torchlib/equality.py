"""The one definition of "equal"."""

from __future__ import annotations

import torch
from torch import Tensor

from .complex_numbers import real_parts

# Per tensor, the largest difference over the largest reference value. Up to the first bound, float32 values are equal;
# above it the case runs again in float64, with the second bound.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-6}
HUGE = 1e20  # masks are filled with the smallest number of a dtype, which must not set the scale


def relative_error(value: Tensor, reference: Tensor, scale: float | None = None) -> float:
    """The largest difference over the largest reference value. It is infinite if the shapes differ, for a NaN, and where
    only one of the two is beyond `HUGE`.

    Args:
        scale: the largest reference value, if it is known.
    """
    if value.shape != reference.shape or value.is_complex() != reference.is_complex():
        return float("inf")
    scale = magnitude(reference) if scale is None else scale
    value, reference = real_parts(value), real_parts(reference)
    if torch.promote_types(value.dtype, reference.dtype) not in TOLERANCE:
        value, reference = value.double(), reference.double()
    difference = magnitude(value - reference)
    if not (difference < HUGE / 2 and scale < HUGE / 2):  # rare: a NaN, or a value as large as a mask's
        if torch.isnan(value).any():
            return float("inf")
        difference, scale = _without_huge(value, reference)
    return difference / scale if scale else (0.0 if difference == 0.0 else float("inf"))


def _without_huge(value: Tensor, reference: Tensor) -> tuple[float, float]:
    """The magnitudes of the difference and of the reference where neither is beyond `HUGE`; infinite where only one is."""
    huge = (reference.abs() >= HUGE) | (value.abs() >= HUGE)
    if huge.any():
        smaller = torch.minimum(value[huge].abs(), reference[huge].abs())
        if not torch.equal(value[huge].sign(), reference[huge].sign()) or (smaller < HUGE).any():
            return float("inf"), 1.0
        value, reference = value[~huge], reference[~huge]
    return magnitude(value - reference), magnitude(reference)


def magnitude(tensor: Tensor) -> float:
    """The largest absolute value; NaN if there is one, 0 for an empty tensor."""
    if not tensor.numel():
        return 0.0
    tensor = real_parts(tensor)
    if not tensor.is_floating_point():
        tensor = tensor.double()
    # A norm of order infinity takes 17 times as long for a million values.
    least, largest = (value.item() for value in torch.aminmax(tensor.detach()))
    return max(abs(least), abs(largest))
