"""One training step of the unsharded model: what the sharded one is held against."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .exact import in_precision_of


@dataclass(frozen=True)
class Step:
    """The results of one forward and backward.

    Args:
        loss: scalar.
        logits: [batch, sequence, vocabulary].
        gradients: by full parameter name, tied parameters under each name; every parameter that got a gradient.
    """

    loss: Tensor
    logits: Tensor
    gradients: Mapping[str, Tensor]


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


def cast(inputs: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The inputs with their floating-point tensors in another dtype."""
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def reference_step(model: nn.Module, inputs: Mapping[str, Any]) -> Step:
    """Run the unsharded model forward and backward."""
    with in_precision_of(model):
        loss, logits = outcome(model(**inputs))
        loss.backward()
    gradients = {
        name: parameter.grad.detach()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.grad is not None
    }
    return Step(loss.detach(), logits.detach(), gradients)
