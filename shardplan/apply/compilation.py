"""Per-module torch.compile of a module's forward: hooks (doors of the block, FSDP2) stay outside the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from shardplan.core.plan import Compile
from shardplan.torchlib.forward import wrap_forward


class Compiled:
    """Around a module's forward: the same forward, compiled at its first call."""

    def __init__(self, section: Compile):
        self.options = {"fullgraph": section.fullgraph, "backend": section.backend}
        self.compiled: Callable[..., Any] | None = None

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        if self.compiled is None:
            self.compiled = torch.compile(forward, **self.options)
        return self.compiled(*args, **kwargs)


def compile_modules(model: nn.Module, names: Iterable[str], section: Compile) -> None:
    """Compile the forward of the named modules, each on its own."""
    for name in names:
        wrap_forward(model.get_submodule(name), Compiled(section))
