"""inductor, whose graphs run below autograd.

A compiled graph is what autograd has already taken apart, yet each operator that it calls passes through autograd's part of
the dispatcher, and for torch's functional collectives that part is Python: with nothing to record it costs a
sequence-parallel layer about 300 microseconds (`python -m benchmarks.host`).

What torch takes whole from its cache of autograd's graphs runs as torch has it. Our moves are autograd functions, and graphs
with those are not in that cache unless somebody sets `autograd_cache_allow_custom_autograd_functions`.
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
    """A backend for `torch.compile`; equal ones share their graphs between modules.

    Args:
        fused: asynchronous tensor parallelism, and where it notes what became of it.
    """

    fused: Fused | None = None

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        options = None if self.fused is None else inductor_options(self.fused)
        return private("compile_fx")(graph, inputs, inner_compile=_compile, config_patches=options)


def _compile(graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    compiled = private("compile_fx_inner")(graph, inputs, **options)
    run = getattr(compiled, "current_callable", None)
    if run is None:  # a graph without operators is no code, but the graph's own function
        return compiled

    def below_autograd(values: Sequence[Any]) -> Any:
        with _below_autograd():
            return run(values)

    compiled.current_callable = below_autograd
    return compiled
