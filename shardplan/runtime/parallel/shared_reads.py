"""Values that several modules of a block read: the first moves one, and the others reuse the result.

Each of q, k and v moves its argument from I to R: it returns the tensor, and reduces its gradient over the ranks. Where they read
the same tensor, one move is enough, because summing over ranks is linear: their gradients are added before one reduction
(Megatron-LM has operator f once in front of a block, arXiv 1909.08053). Tensors are compared by identity when the model
runs, so the sharing is correct on every batch, whichever branch runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardplan.core.layout import I, R

from .tensor_moves import move


class SharedReads:
    """What was moved I -> R in the current call of one module, over one mesh.

    Nothing is kept where no gradient is recorded: there the move does nothing. So a re-entrant checkpoint, whose first run
    records none, neither adds to it nor takes from it.
    """

    def __init__(self) -> None:
        self.moved: list[tuple[Tensor, int, Tensor]] | None = None  # (value, its version, moved); None: no call runs

    def read(self, x: Tensor, mesh: DeviceMesh) -> Tensor:
        """A value, moved I -> R; the same object for all that read it before it is changed."""
        if self.moved is None or not (x.requires_grad and torch.is_grad_enabled()):
            return move(x, mesh, I, R)
        version = _version(x)
        for value, at, moved in self.moved:
            if value is x and at == version:
                return moved
        moved = move(x, mesh, I, R)
        self.moved.append((x, version, moved))
        return moved


def _version(x: Tensor) -> int:
    """How often a tensor was changed in place. In a graph that is being compiled nothing tells; there torch itself refuses to
    use what was moved once the value is changed (a view that a function of ours returned)."""
    return 0 if torch.compiler.is_compiling() else x._version


class ReadsOnce:
    """Around the forward of a module that holds several readers: each call has a table of its own.

    Args:
        table: the readers'.
    """

    def __init__(self, table: SharedReads):
        self.table = table

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        before, self.table.moved = self.table.moved, []
        try:
            return forward(*args, **kwargs)
        finally:
            self.table.moved = before
