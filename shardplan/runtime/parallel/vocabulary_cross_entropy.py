"""Cross-entropies that make at most one chunk of logits at a time."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch
from torch import Tensor

from .vocabulary_logits import IGNORE_INDEX
from .vocabulary_sums import Rows, sums_of

Reduction = Literal["none", "mean", "sum"]


def cross_entropy_of(
    rows: Rows,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: Reduction,
    label_smoothing: float,
    z_loss: float,
    chunk: int | None,
) -> Tensor:
    """`vocabulary_loss.cross_entropy`, with the same arguments."""
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f'reduction must be "none", "mean" or "sum", not {reduction!r}')
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be from 0 to 1, not {label_smoothing}")
    if target.is_floating_point():
        raise TypeError("target must be ids of tokens, not probabilities")
    if target.shape != rows.values.shape[:-1]:
        raise ValueError(f"the target's shape is {tuple(target.shape)}, for {tuple(rows.values.shape[:-1])} tokens")
    size = rows.split.size
    if weight is not None and weight.shape != (size,):
        raise ValueError(f"weight must have one number for each of {size} tokens, not {tuple(weight.shape)}")
    ignored = target == ignore_index
    ids = target.masked_fill(ignored, 0).long()
    unknown = (ids < 0) | (ids >= size)
    if weight is None and reduction != "none" and chunk is None:
        counts = ~(ignored | unknown)
        if (total := sum_by_kernel(rows, target, counts, label_smoothing, z_loss)) is not None:
            total = total.masked_fill((unknown & ~ignored).any(), torch.nan)
            return total if reduction == "sum" else total / counts.sum()
    every = None
    if label_smoothing:
        every = torch.ones((), device=target.device) if weight is None else weight
    sums = sums_of(rows, ids.unsqueeze(-1), every, chunk)
    weights = None if weight is None else weight.to(sums.total.dtype)
    of_target = torch.ones_like(sums.total) if weights is None else weights[ids.clamp(0, size - 1)]
    losses = -(1 - label_smoothing) * of_target * sums.logs.squeeze(-1)
    if label_smoothing:
        mass = size if weights is None else weights.sum()
        losses = losses + label_smoothing / size * (mass * sums.total - sums.weighed)
    if z_loss:
        losses = losses + z_loss * sums.total.square()
    losses = losses.masked_fill(unknown, torch.nan).masked_fill(ignored, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / of_target.masked_fill(ignored, 0.0).sum()


# Kernels of other packages for the losses of fused logits: Liger's, where it is installed and fits.
DEVICES = ("cuda",)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OLDEST = (0, 8)  # older releases of Liger have other arguments


def sum_by_kernel(rows: Rows, target: Tensor, counts: Tensor, label_smoothing: float, z_loss: float) -> Tensor | None:
    """The sum of the losses of the tokens that count. Its gradients are computed in forward, so all tokens must have one factor. None where
    no kernel is installed, or none fits: the vocabulary is split, the model's code changes the logits, or the dtype or device is another.

    Args:
        target: [..., tokens]; all that count are ids of the vocabulary.
        counts: [..., tokens], bool.
    """
    head = rows.head
    if head is None or head.change is not None or rows.split.group is not None or rows.temperature != 1.0:
        return None
    tensors = [x for x in (rows.values, head.weight, head.bias) if x is not None]
    dtypes, devices = {x.dtype for x in tensors}, {x.device.type for x in tensors}
    if len(dtypes) > 1 or not dtypes <= {*DTYPES} or not devices <= {*DEVICES} or torch.compiler.is_compiling():
        return None
    if (liger := _liger()) is None:
        return None
    total: Tensor = liger(
        rows.values.flatten(0, -2),
        head.weight,
        target.masked_fill(~counts, IGNORE_INDEX).flatten(),
        head.bias,
        ignore_index=IGNORE_INDEX,
        label_smoothing=label_smoothing,
        lse_square_scale=z_loss,
        reduction="sum",
        accum_dtype=torch.float32,
    )
    return total


@cache
def _liger() -> Any:
    try:
        found = version("liger-kernel")
    except PackageNotFoundError:
        return None
    if tuple(map(int, found.split(".")[:2])) < OLDEST:
        return None
    return import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
