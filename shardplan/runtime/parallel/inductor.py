"""Runs inductor's graphs below autograd.

autograd has already processed a compiled graph, yet each operator call in it passes through autograd's part of the
dispatcher. For torch's functional collectives that part is Python. So, although nothing is recorded, a sequence-parallel
layer takes about 300 microseconds more (`python -m benchmarks.host`).

Graphs from torch's cache of autograd graphs run unchanged. Our moves are autograd functions; graphs with these are cached
only if somebody sets `autograd_cache_allow_custom_autograd_functions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from shardplan.torchlib.private import private

from .async_tp import Fused, inductor_options

_below_autograd = private("below_autograd")


@dataclass(frozen=True)
class Inductor:
    """A backend for `torch.compile`; modules with equal backends share their graphs.

    Args:
        fused: for asynchronous tensor parallelism; records the fused operators.
    """

    fused: Fused | None = None

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        options = None if self.fused is None else inductor_options(self.fused)
        return private("compile_fx")(graph, inputs, inner_compile=_compile, config_patches=options)


def _compile(graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    compiled = private("compile_fx_inner")(graph, inputs, **options)
    run = getattr(compiled, "current_callable", None)
    if run is None:  # for a graph without operators inductor makes no code
        return compiled

    def below_autograd(values: Sequence[Any]) -> Any:
        with _below_autograd():
            return run(values)

    compiled.current_callable = below_autograd
    return compiled
