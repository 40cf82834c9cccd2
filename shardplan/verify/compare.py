"""The one definition of "equal", and what a comparison says."""

from __future__ import annotations

import torch
from torch import Tensor

FP32_TOLERANCE = 1e-5  # at most this is equal in float32
FP64_TOLERANCE = 1e-6  # above that the case runs again in float64, where at most this is equal
NEGLIGIBLE = 1e-12  # of the model's largest gradient: a reference below it proves nothing


def worst_error(value: Tensor, reference: Tensor) -> float:
    """The largest difference over the largest reference value; infinite where a value is not finite or the shape is
    another."""
    if value.shape != reference.shape:
        return float("inf")
    difference = (value.double() - reference.double()).abs().max().item() if value.numel() else 0.0
    if difference != difference:
        return float("inf")
    scale = reference.double().abs().max().item() if reference.numel() else 0.0
    if scale == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / scale


def magnitude(tensor: Tensor) -> float:
    """The largest absolute value."""
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0


def same_routing(value: Tensor, reference: Tensor) -> bool:
    """Whether two sets of chosen experts are the same (`[tokens, k]` indices)."""
    return torch.equal(value.sort(-1).values, reference.sort(-1).values)
