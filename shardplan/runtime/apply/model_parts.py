"""A rank's part of a model: the model itself, or several parts of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

_ALIVE: WeakSet[Parted] = WeakSet()


class Parted:
    """Base class of a model in parts.

    Attributes:
        parts: this rank's parts, as models; with those of other ranks they are one model.
        group: the ranks whose parts together are one model.
        device: where the parts compute.
        record: the `AppliedParts` of its plan.
        doubled: this rank's parameters that are copies of a parameter in an earlier part.
    """

    parts: list[nn.Module]
    group: ProcessGroup
    device: torch.device
    record: Any
    doubled: tuple[nn.Parameter, ...] = ()

    def __init__(self) -> None:
        _ALIVE.add(self)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's parts, each once, for an optimizer."""
        yield from dict.fromkeys(parameter for part in self.parts for parameter in part.parameters())

    def check_finished(self) -> None:
        """Raise ValueError where gradients are not complete yet."""


def parts_of(model: nn.Module | Parted) -> tuple[nn.Module, ...]:
    """The parts of this rank; a whole model is its only part."""
    return tuple(model.parts) if isinstance(model, Parted) else (model,)


def refuse_parts(tensors: Iterable[Tensor], function: str) -> None:
    """Raise ValueError for parameters of a model whose other parts are on other ranks."""
    if not _ALIVE:
        return
    own = {id(parameter) for one in _ALIVE for parameter in one.parameters()}
    if any(id(tensor) in own for tensor in tensors):
        raise ValueError(
            f"these are parameters of pipeline stages, and other stages are on other ranks: call {function}(pipeline, ...) with "
            "the Pipeline that apply_plan returned"
        )
