"""Sending tokens to the ranks of their experts, and the results back. Its gradient is the reverse exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .collectives import all_to_all
from .second_derivatives import refuse_second_derivatives


@dataclass(frozen=True, slots=True)
class ExchangeBackend:
    """A way to exchange rows.

    Args:
        name: its name in messages.
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
    """How many rows each rank sends to and receives from each other rank.

    Args:
        sent: rows for each rank of the group.
        received: rows from each rank.
        group: the ranks that have the experts.
        backend: the way to send them.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    group: ProcessGroup
    backend: ExchangeBackend

    @property
    def back(self) -> Route:
        """The reverse route."""
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
    """Exchange rows of several tensors, in one node of the graph: so all ranks run the exchanges of backward in the same
    order."""
    return _Exchange.apply(route, *tensors)


def swap(x: Tensor, group: ProcessGroup) -> Tensor:
    """Exchange one row with each rank: row i of the result is rank i's row for this rank."""
    ones = [1] * group.size()
    return all_to_all(x, ones, ones, group)
