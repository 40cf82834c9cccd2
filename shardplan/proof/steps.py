"""One training step of the unsharded model: what the sharded one is held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardplan.twin.outcome import outcome

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
