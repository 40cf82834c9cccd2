"""One forward and backward of a model, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Step:
    """What one training step of an unsharded model gives.

    Args:
        loss: scalar.
        logits: [batch, sequence, vocabulary].
        gradients: by full parameter name, for every parameter that requires one; tied parameters under each name.
    """

    loss: Tensor
    logits: Tensor
    gradients: Mapping[str, Tensor]


def reference_step(model: nn.Module, inputs: Mapping[str, Any]) -> Step:
    """Run the unsharded model forward and backward."""
    output = model(**inputs)
    output.loss.backward()
    gradients = {
        name: parameter.grad.detach()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.grad is not None
    }
    return Step(output.loss.detach(), output.logits.detach(), gradients)


def distributed_step(model: nn.Module, inputs: Mapping[str, Any], backward: Callable[[Tensor], None]) -> Any:
    """Run a sharded model forward and backward; returns the model's output."""
    output = model(**inputs)
    backward(output.loss)
    return output
