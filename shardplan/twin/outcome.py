"""The loss and the logits among what a model returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor


def outcome(output: Any) -> tuple[Tensor, Tensor]:
    """The loss and the logits of what a model's forward returned.

    Without a loss of its own (a module that returns a tensor, a model without a head) the mean of the squares of the
    first tensor takes its place: every element of the output then has a gradient.

    Raises:
        ValueError: there is no floating-point tensor in it.
    """
    loss, logits = getattr(output, "loss", None), getattr(output, "logits", None)
    if logits is None:
        parts = output.values() if isinstance(output, Mapping) else output
        parts = [parts] if isinstance(parts, Tensor) else parts if isinstance(parts, Iterable) else []
        logits = next((part for part in parts if isinstance(part, Tensor) and part.is_floating_point()), None)
    if logits is None:
        raise ValueError(
            f"the model returned {type(output).__name__} without a floating-point tensor: nothing to compare"
        )
    if loss is None:
        whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
        loss = whole.square().mean()
    return loss, logits
