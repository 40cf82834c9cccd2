"""Partial sums that wait for another one, to be reduced by one collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardplan.core.layout import Layout


class Waiting:
    """The partial sums that wait for one module's."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def put(self, module: str, x: Tensor, dst: Layout, mesh: DeviceMesh) -> Tensor:
        """Keep a module's partial sum; returns zeros of the shape that the reduced one would have."""
        self.sums[module] = x
        shape = list(x.shape)
        if dst.kind == "V":
            shape[dst.dim] //= mesh.size()
        return x.new_zeros(shape)

    def take(self, modules: Sequence[str], x: Tensor) -> Tensor:
        """A partial sum with those of the modules added.

        Raises:
            RuntimeError: one of them did not run before.
        """
        for module in modules:
            if module not in self.sums:
                raise RuntimeError(f"{module} did not run in this forward, but its partial sum is to be reduced here")
            x = x + self.sums.pop(module)
        return x


class Collects:
    """Around the forward of a block: nothing waits once it is over, whichever way it ends. Activation checkpointing ends its
    second run where the last tensor is there that backward needs.

    Args:
        waiting: by the module that they wait for.
    """

    def __init__(self, waiting: Mapping[str, Waiting]):
        self.waiting = tuple(waiting.values())

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        try:
            result = forward(*args, **kwargs)
            for one in self.waiting:
                if one.sums:
                    raise RuntimeError(f"the partial sums of {', '.join(one.sums)} were not reduced in this forward")
            return result
        finally:
            for one in self.waiting:
                one.sums.clear()
