"""torch's RMS norm, step by step, so that its mean of squares can cover more features than a rank has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

RMS_NORMS = (functional.rms_norm, torch.rms_norm)


def rms_norm(
    mean: Callable[[Tensor], Tensor],
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """torch.rms_norm over the last dim (arXiv 1910.07467), in its order of operations.

    Args:
        mean: takes the squares [..., features], in float32 if x is in half precision; returns their mean over the last dim, [..., 1].
        x: [..., features].
        normalized_shape: one number; it is not read, as a rank may have fewer features.
        weight: [features].
        eps: None: the machine epsilon of the dtype that it computes in.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    inverse = torch.rsqrt(mean(wide.pow(2)) + (torch.finfo(wide.dtype).eps if eps is None else eps))
    result = wide * inverse
    return (result if weight is None else result * weight).to(x.dtype)
