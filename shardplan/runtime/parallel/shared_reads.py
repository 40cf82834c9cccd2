"""Values that several modules of a block read: the first module moves the value, and the others reuse the result.

Each of q, k and v moves its argument from I to R: the move returns the tensor, and reduces its gradient over the ranks. Where
they read the same tensor, one move is enough, because summing over ranks is linear: their gradients are added before one
reduction (Megatron-LM has one operator f before a block, arXiv 1909.08053). Tensors are compared by identity when the model runs,
so the sharing is correct on every batch, whichever branch runs.
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
    """The I -> R moves in the current call of one module, over one mesh.

    Nothing is kept if no gradient is recorded: then the move does nothing. So the first run of a re-entrant checkpoint,
    which records none, neither adds a value nor takes one.
    """

    def __init__(self) -> None:
        self.moved: list[tuple[Tensor, int, Tensor]] | None = None  # (value, its version, moved); None: no call runs

    def read(self, x: Tensor, mesh: DeviceMesh) -> Tensor:
        """A value, moved I -> R; all readers get the same object until the value is changed."""
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
    """How often a tensor was changed in place. This is unknown in a graph that is being compiled; there torch itself refuses
    to use the moved value after a change (it is a view that a function of ours returned)."""
    return 0 if torch.compiler.is_compiling() else x._version


class ReadsOnce:
    """Wraps the forward of a module with several readers: each call has its own table.

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
