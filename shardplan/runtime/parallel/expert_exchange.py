"""Sending tokens to the ranks of their experts, and the results back. Its gradient is the exchange the other way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .collectives import all_to_all
from .tensor_moves import refuse_second_derivatives


@dataclass(frozen=True, slots=True)
class ExchangeBackend:
    """A way to exchange rows.

    Args:
        name: what messages call it.
        all_to_all: (rows [sum of sent, ...], rows received from each rank, rows sent to each, group) -> [sum of received, ...],
            in the order of the ranks.
        available: whether it runs here.
    """

    name: str
    all_to_all: Callable[[Tensor, Sequence[int], Sequence[int], ProcessGroup], Tensor]
    available: Callable[[], bool]


BACKENDS = {"torch": ExchangeBackend("torch", all_to_all, torch.distributed.is_available)}


@dataclass(frozen=True, slots=True)
class Route:
    """How many rows go where.

    Args:
        sent: to each rank of the group.
        received: from each.
        group: the ranks that have the experts.
        backend: what sends them.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    group: ProcessGroup
    backend: ExchangeBackend

    @property
    def back(self) -> Route:
        """The same rows the other way."""
        return Route(self.received, self.sent, self.group, self.backend)

    def exchange(self, x: Tensor) -> Tensor:
        """Exchange rows, [R, ...], without a gradient."""
        with torch.no_grad():
            return self.backend.all_to_all(x, self.received, self.sent, self.group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, route: Route, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back = route.back
        results = tuple(route.exchange(x) for x in tensors)
        ctx.mark_non_differentiable(
            *(y for y, needed in zip(results, ctx.needs_input_grad[1:], strict=True) if not needed)
        )
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        needed = ctx.needs_input_grad[1:]
        return None, *(ctx.back.exchange(g) if n else None for n, g in zip(needed, gradients, strict=True))


def exchange(route: Route, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Exchange rows of several tensors. They are one node of the graph, so that all ranks run the exchanges of backward in
    one order."""
    return _Exchange.apply(route, *tensors)


def swap(x: Tensor, group: ProcessGroup) -> Tensor:
    """Row i of the result is what rank i has for this rank: as many rows as ranks."""
    ones = [1] * group.size()
    return all_to_all(x, ones, ones, group)
