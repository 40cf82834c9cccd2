"""Gathering again in backward: autograd keeps this rank's shard instead of the gathered value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh

from shardplan.torchlib.private import private

from .collectives import all_gather

_top_hooks = private("top_saved_tensors_hooks")
_AGAIN = "_shardplan_again"  # on a gathered value: gathers it again


class Again:
    """A gathered value that can be gathered again.

    Args:
        shard: this rank's.
        whole: the value; it is not kept.
    """

    def __init__(self, shard: Tensor, whole: Tensor, mesh: DeviceMesh, dim: int):
        assert whole.is_contiguous() and not whole.storage_offset()
        self.shard, self.mesh, self.dim, self.size = shard.detach(), mesh, dim, whole.shape[dim]
        self.storage = whole.untyped_storage()._cdata
        self.version = whole._version
        self.uses = 0  # views of the value that autograd keeps
        self.left = 0  # of them to be returned before the value is freed
        self.value: Tensor | None = None

    def is_in(self, x: Tensor) -> bool:
        """Whether a tensor is the value, or a view of it."""
        return type(x) is not nn.Parameter and x.untyped_storage()._cdata == self.storage

    def view(self, kept: View) -> Tensor:
        """A view of the value, which is gathered for the first view and freed after the last."""
        if self.value is None:
            self.value, self.left = all_gather(self.shard, self.mesh, self.dim, self.size), self.uses
        found = self.value.as_strided(kept.shape, kept.stride, kept.offset)
        found = found if found.dtype == kept.dtype else found.view(kept.dtype)
        self.left -= 1
        if not self.left:
            self.value = None
        return found


@dataclass(frozen=True, slots=True)
class View:
    """What autograd keeps of a gathered value."""

    of: Again
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    dtype: torch.dtype


def note(whole: Tensor, shard: Tensor, mesh: DeviceMesh, dim: int) -> None:
    """Remember with a gathered value what it was gathered from."""
    setattr(whole, _AGAIN, Again(shard, whole, mesh, dim))


class Regather:
    """Around the forward of a module with such a block input."""

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        found = [getattr(x, _AGAIN) for x in (*args, *kwargs.values()) if hasattr(x, _AGAIN)]
        # Outer hooks that decide what is kept (a checkpoint, offloading) apply here too.
        if torch.compiler.is_compiling() or not found or not torch.is_grad_enabled() or _top_hooks(False) is not None:
            return forward(*args, **kwargs)

        def pack(x: Tensor) -> Tensor | View:
            for again in found:
                if again.is_in(x):
                    again.uses += 1
                    return View(again, x.shape, x.stride(), x.storage_offset(), x.dtype)
            return x

        def unpack(kept: Tensor | View) -> Tensor:
            return kept.of.view(kept) if isinstance(kept, View) else kept

        with saved_tensors_hooks(pack, unpack):
            result = forward(*args, **kwargs)
        values = (x for x in (*args, *kwargs.values()) if hasattr(x, _AGAIN))
        for again, value in zip(found, values, strict=True):
            if value._version != again.version:
                raise RuntimeError("a module changes its gathered input in place: remove `regather` from its rule")
        return result
