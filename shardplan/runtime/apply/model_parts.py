"""A model, or several that are parts of one: what a rank has of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

_ALIVE: WeakSet[Parted] = WeakSet()


class Parted:
    """The base of what has a model in parts.

    Attributes:
        parts: those of this rank, as models; together with those of other ranks they are one model.
        group: of the ranks whose parts are one model together.
        device: where the parts compute.
        record: what was done to them, an `AppliedParts`.
        doubled: those of this rank's parameters that are copies of one in an earlier part.
    """

    parts: list[nn.Module]
    group: ProcessGroup
    device: torch.device
    record: Any
    doubled: tuple[nn.Parameter, ...] = ()

    def __init__(self) -> None:
        _ALIVE.add(self)

    def parameters(self) -> Iterator[nn.Parameter]:
        """For an optimizer: the parameters of this rank's parts, each once."""
        yield from dict.fromkeys(parameter for part in self.parts for parameter in part.parameters())

    def check_finished(self) -> None:
        """Raise ValueError where gradients are not complete yet."""


def parts_of(model: nn.Module | Parted) -> tuple[nn.Module, ...]:
    """The parts of this rank; a model is its own one part."""
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
