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

from .later_weights import Keeper, Readers, keeper
from .tensor_moves import Move


class SharedReads:
    """The I -> R moves in the current call of one module, over one mesh.

    Nothing is kept if no gradient is recorded: then the move does nothing. So the first run of a re-entrant checkpoint,
    which records none, neither adds a value nor takes one.
    """

    def __init__(self) -> None:
        self.moved: list[tuple[Tensor, int, Tensor]] | None = None  # (value, its version, moved); None: no call runs
        self.keeper: Keeper = None  # what kept saved tensors when the call began
        self.readers: dict[str, Readers] = {}  # by module

    def readers_of(self, name: str, shared_with: str | None) -> Readers:
        """The readers of the value that a module moves.

        Args:
            shared_with: a module that moves the same value.
        """
        readers = self.readers.setdefault(shared_with or name, Readers())
        return self.readers.setdefault(name, readers)

    def read(self, x: Tensor, to_readers: Move, readers: Readers, variant: str, kept_by: Keeper) -> Tensor:
        """A value, moved I -> R; all readers get the same object until the value is changed.

        Args:
            to_readers: this move.
        """
        if self.moved is None or not (x.requires_grad and torch.is_grad_enabled()):
            return to_readers(x)
        compiling = torch.compiler.is_compiling()
        # How often it was changed in place. This is unknown in a graph that is being compiled; there torch itself refuses to use the
        # moved value after a change (it is a view that a function of ours returned).
        version = 0 if compiling else x._version
        for value, at, moved in self.moved:
            if value is x and at == version:
                return moved
        # A checkpoint of a part of the call runs it again without the call, and must save the same both times.
        later = None if compiling or kept_by is not self.keeper else readers.later(variant, kept_by)
        moved = to_readers(x, later=later)
        self.moved.append((x, version, moved))
        return moved


class ReadsOnce:
    """Wraps the forward of a module with several readers: each call has its own table.

    Args:
        table: the readers'.
    """

    def __init__(self, table: SharedReads):
        self.table = table

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        table = self.table
        before, table.moved = (table.moved, table.keeper), []
        table.keeper = keeper()
        try:
            return forward(*args, **kwargs)
        finally:
            table.moved, table.keeper = before
