"""Complex numbers as pairs of real ones."""

from __future__ import annotations

import torch
from torch import Tensor


def real_parts(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, in a last dim of 2; casting them to a real dtype would drop the imaginary
    parts. Other tensors are returned unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
