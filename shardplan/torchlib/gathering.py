"""DTensors as whole tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

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
