"""DTensors as whole tensors, and the objects of all ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

_REDISTRIBUTE = logging.getLogger("torch.distributed.tensor._redistribute")


def full_tensor(value: DTensor) -> Tensor:
    """`value.full_tensor()`. A collective.

    torch (2.11 to 2.13) warns on every rank that two mesh axes are gathered one after the other; the caller cannot
    change that.
    """
    with without_advice():
        return value.full_tensor()


def of_all(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The value of each rank of a process group; None: the default group. A collective of it, on the hosts."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


@contextmanager
def without_advice() -> Iterator[None]:
    """Suppress torch's warning about redistributions over several mesh axes."""

    def about_something_else(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("While redistributing from")

    _REDISTRIBUTE.addFilter(about_something_else)
    try:
        yield
    finally:
        _REDISTRIBUTE.removeFilter(about_something_else)
