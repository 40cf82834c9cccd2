"""Partial sums that wait for another one, to be reduced by one collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardplan.core.layout import Layout


class Waiting:
    """The partial sums that wait for one module's.

    Args:
        modules: whose they are. Their names are for messages alone: compiled layers share what does not depend on a name.
    """

    def __init__(self, modules: tuple[str, ...]):
        self.modules = modules
        self.count = len(modules)
        self.sums: list[Tensor] = []

    def put(self, x: Tensor, dst: Layout, mesh: DeviceMesh) -> Tensor:
        """Keep a partial sum; returns zeros of the shape that the reduced one would have."""
        self.sums.append(x)
        shape = list(x.shape)
        if dst.kind == "V":
            shape[dst.dim] //= mesh.size()
        return x.new_zeros(shape)

    def take(self, x: Tensor) -> Tensor:
        """A partial sum with those that wait for it added.

        Raises:
            RuntimeError: not all of them ran before.
        """
        if len(self.sums) != self.count:
            raise RuntimeError(f"of {', '.join(self.modules)} only {len(self.sums)} ran before their sum is reduced")
        for other in self.sums:
            x = x + other
        self.sums.clear()
        return x


class Collects:
    """Around the forward of a block: nothing waits once it is over, whichever way it ends. Activation checkpointing ends its
    second run where the last tensor is there that backward needs.

    Args:
        waiting: what may wait in it.
    """

    def __init__(self, waiting: Sequence[Waiting]):
        self.waiting = tuple(waiting)

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        try:
            result = forward(*args, **kwargs)
            for one in self.waiting:
                if one.sums:
                    raise RuntimeError(f"partial sums of {', '.join(one.modules)} were not reduced in this forward")
            return result
        finally:
            for one in self.waiting:
                one.sums.clear()
