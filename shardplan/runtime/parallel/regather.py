"""Regathering in backward: autograd keeps this rank's shards instead of the gathered values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardplan.torchlib.private import private

_top_hooks = private("top_saved_tensors_hooks")
_AGAIN = "_shardplan_again"  # on a gathered value: its `Again`


class Again:
    """Values that were gathered together and can be gathered again.

    Args:
        wholes: the values; they are not kept.
        gather: gathers them.
    """

    def __init__(self, wholes: Sequence[Tensor], gather: Callable[[], Sequence[Tensor]]):
        assert all(whole.is_contiguous() and not whole.storage_offset() for whole in wholes)
        self.gather = gather
        self.storages = {whole.untyped_storage()._cdata: i for i, whole in enumerate(wholes)}
        self.uses = 0  # views of the values that autograd keeps
        self.left = 0  # views to return before the values are freed
        self.values: Sequence[Tensor] | None = None

    def position(self, x: Tensor) -> int | None:
        """The index of the value that a tensor is, or is a view of."""
        return None if type(x) is nn.Parameter else self.storages.get(x.untyped_storage()._cdata)

    def view(self, kept: View) -> Tensor:
        """A view of a value. The values are gathered for the first view and freed after the last one."""
        if self.values is None:
            self.values, self.left = self.gather(), self.uses
        found = self.values[kept.position].as_strided(kept.shape, kept.stride, kept.offset)
        found = found if found.dtype == kept.dtype else found.view(kept.dtype)
        self.left -= 1
        if not self.left:
            self.values = None
        return found


@dataclass(frozen=True, slots=True)
class View:
    """What autograd keeps instead of a gathered value."""

    of: Again
    position: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    dtype: torch.dtype


def note(wholes: Sequence[Tensor], gather: Callable[[], Sequence[Tensor]]) -> None:
    """Record on gathered values how to gather them again."""
    again = Again(wholes, gather)
    for whole in wholes:
        setattr(whole, _AGAIN, again)


class Regather:
    """Wraps the forward of a module with gathered inputs or parameters.

    Args:
        parameters: the gathered ones, with the modules that own them.
    """

    def __init__(self, parameters: Sequence[tuple[nn.Module, str]] = ()):
        self.parameters = parameters

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        read = (owner._parameters[name] for owner, name in self.parameters)
        values = [x for x in (*args, *kwargs.values(), *read) if hasattr(x, _AGAIN)]
        found: list[Again] = list(dict.fromkeys(getattr(x, _AGAIN) for x in values))
        # Outer hooks that choose what is kept (a checkpoint, offloading) apply here too.
        if torch.compiler.is_compiling() or not found or not torch.is_grad_enabled() or _top_hooks(False) is not None:
            return forward(*args, **kwargs)

        versions = [x._version for x in values]

        def pack(x: Tensor) -> Tensor | View:
            for again in found:
                position = again.position(x)
                if position is not None:
                    again.uses += 1
                    return View(again, position, x.shape, x.stride(), x.storage_offset(), x.dtype)
            return x

        def unpack(kept: Tensor | View) -> Tensor:
            return kept.of.view(kept) if isinstance(kept, View) else kept

        with saved_tensors_hooks(pack, unpack):
            result = forward(*args, **kwargs)
        if [x._version for x in values] != versions:
            raise RuntimeError("a module changes what was gathered for it in place: remove `regather` from its rule")
        return result
