"""Gradient accumulation: gradients are reduced over the data-parallel ranks once, at the last micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule

from .applied import applied

_T = TypeVar("_T")


def micro_batches(model: nn.Module, batches: Iterable[_T]) -> Iterator[_T]:
    """The micro-batches of one optimizer step, the reduction of gradients over data-parallel ranks put off to the last.

    Run forward and backward of each in the body of the loop. Sums over tp belong to each backward and are not put off.
    However the loop ends, the model reduces again afterwards.

    Args:
        model: what `apply_plan` returned.
        batches: one after the other, of any kind; `range(n)` to count.

    Raises:
        ValueError: no plan was applied to the model.
    """
    return _looking_ahead(applied(model).model, iter(batches))


def _looking_ahead(model: nn.Module, batches: Iterator[_T]) -> Iterator[_T]:
    nothing: Any = object()
    batch = next(batches, nothing)
    while batch is not nothing:
        following = next(batches, nothing)
        with nullcontext() if following is nothing else _without_reduction(model):
            yield batch
        batch = following


@contextmanager
def _without_reduction(model: nn.Module) -> Iterator[None]:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    elif (no_sync := getattr(model, "no_sync", None)) is not None:
        with no_sync():
            yield
    else:  # no data-parallel ranks
        yield
