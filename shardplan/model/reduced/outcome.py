"""The results of a model's forward, as named tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from .nests import leaves

ALONE = "output"  # the name of a result that is a tensor by itself


def results_of(output: Any) -> dict[str, Tensor]:
    """Every floating-point tensor in what a forward returned, by its path: `loss`, `0`, `aux.1`.

    This goes into tuples, lists, mappings and dataclasses at any depth. Other objects are left out: decoding caches belong
    to the rank that made them.

    Raises:
        ValueError: there is no floating-point tensor in it.
    """
    found = {".".join(map(str, path)) or ALONE: tensor for path, tensor in leaves(output) if tensor.is_floating_point()}
    if not found:
        raise ValueError(
            f"the model returned {type(output).__name__} without a floating-point tensor: nothing to compare"
        )
    return found


def loss_of(output: Any) -> Tensor:
    """The loss in what a forward returned; where there is none, the mean of the squares of the first tensor.

    Raises:
        ValueError: as `results_of`.
    """
    results = results_of(output)
    if "loss" in results:
        return results["loss"]
    first = next(iter(results.values()))
    return (first.full_tensor() if isinstance(first, DTensor) else first).square().mean()
