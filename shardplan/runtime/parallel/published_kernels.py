"""Kernels of other packages for the losses of fused logits: Liger's, where it is installed and fits."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from .vocabulary_logits import IGNORE_INDEX
from .vocabulary_sums import Rows

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
