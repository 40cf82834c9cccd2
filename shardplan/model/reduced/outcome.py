"""The results of a model's forward, as named tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardplan.core.tree import full_name

ALONE = "output"  # the name of a result that is a tensor by itself


def results_of(output: Any) -> dict[str, Tensor]:
    """Every floating-point tensor in what a forward returned, by its path: `loss`, `0`, `aux.1`.

    This goes into tuples, lists, mappings and dataclasses at any depth. Other objects are left out: decoding caches belong
    to the rank that made them.

    Raises:
        ValueError: there is no floating-point tensor in it.
    """
    found = {path or ALONE: tensor for path, tensor in _walk(output, "")}
    if not found:
        raise ValueError(
            f"the model returned {type(output).__name__} without a floating-point tensor: nothing to compare"
        )
    return found


def _walk(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(item, full_name(path, str(key)))
    elif isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", range(len(value)))
        for name, item in zip(names, value, strict=True):
            yield from _walk(item, full_name(path, str(name)))
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _walk(getattr(value, field.name), full_name(path, field.name))


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
