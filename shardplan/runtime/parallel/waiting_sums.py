"""Partial sums that wait until one collective reduces them together with another one: a plan's `sum_outputs`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardplan.core.layout import Layout
from shardplan.torchlib.private import private

_current_graph_task_id = private("current_graph_task_id")


class Waiting:
    """The partial sums that wait for one module's sum, in one call of the block around them.

    A partial sum outside of a call of the block (its module is called directly) does not wait: it is reduced alone.

    Args:
        modules: the modules of the sums; at the last one all are reduced. The names are only for messages: compiled layers
            share what does not depend on a name.
        rule: the plan's rule, for messages.
    """

    def __init__(self, modules: tuple[str, ...], rule: str = ""):
        self.modules = modules
        self.rule = rule
        self.sums: list[Tensor] = []
        self.running = False
        self.with_grad = False  # whether the block's call records gradients

    def puts_off(self) -> bool:
        """Whether a partial sum now waits, and is not reduced at its own module: in a call of the block, and where a checkpoint
        inside the block runs part of it again in backward."""
        return self.running or _current_graph_task_id() != -1

    def put(self, x: Tensor, dst: Layout, mesh: DeviceMesh) -> Tensor:
        """Keep a partial sum; returns zeros in the shape of the reduced one.

        Raises:
            RuntimeError: its gradient would be lost.
        """
        if self.running:  # else a checkpoint runs it again, and the sum was made before
            self._check_gradients()
            self.sums.append(x)
        shape = list(x.shape)
        if dst.kind == "V":
            shape[dst.split_dim(x.ndim)] //= mesh.size()
        return x.new_zeros(shape)

    def take(self, x: Tensor) -> Tensor:
        """Add the waiting sums to a partial sum.

        Raises:
            RuntimeError: the gradient of one would be lost; or a checkpoint inside the block runs this part of it again.
        """
        if not self.running:
            if _current_graph_task_id() != -1:
                raise RuntimeError(
                    f"a checkpoint around {self.modules[-1]} alone needs the sum of {self._names} again, but only the block "
                    f"around them computes it: checkpoint the block, or {self._remedy}"
                )
            return x
        self._check_gradients()
        for other in self.sums:
            x = x + other
        self.sums.clear()
        return x

    def begin(self) -> None:
        self.running, self.with_grad = True, torch.is_grad_enabled()

    def check_empty(self) -> None:
        """Raise RuntimeError if a partial sum is left over."""
        if self.sums:
            raise RuntimeError(
                f"{self.modules[-1]} did not run after {self._others}, but their partial sums are reduced with its own: "
                f"{self._remedy}"
            )

    def end(self) -> None:
        self.running = False
        self.sums.clear()

    def _check_gradients(self) -> None:
        if torch.is_grad_enabled() != self.with_grad:
            raise RuntimeError(
                f"some of {self._names} run without gradients, but the block around them records gradients (or the other "
                "way round): the gradient of a partial sum would be lost. A checkpoint inside the block needs "
                f"use_reentrant=False; else {self._remedy}"
            )

    @property
    def _names(self) -> str:
        return ", ".join(self.modules)

    @property
    def _others(self) -> str:
        return ", ".join(self.modules[:-1])

    @property
    def _remedy(self) -> str:
        return f"delete {self.rule}"


class Collects:
    """Wraps the forward of a block: no sum waits after it, whichever way it ends. Activation checkpointing ends its second
    run once it has the last tensor that backward needs.

    Args:
        waiting: the sums that may wait in it, with sequence parallelism and without.
    """

    def __init__(self, waiting: Sequence[Waiting]):
        self.waiting = tuple(waiting)

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        for one in self.waiting:
            one.begin()
        try:
            result = forward(*args, **kwargs)
            for one in self.waiting:
                one.check_empty()
            return result
        finally:
            for one in self.waiting:
                one.end()
