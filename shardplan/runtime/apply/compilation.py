"""torch.compile of each module's forward: its hooks (block inputs, FSDP2) stay outside of the graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule

from shardplan.core.sections import Compile
from shardplan.runtime.parallel.async_tp import Fused, enable_symmetric_memory, inductor_options
from shardplan.runtime.parallel.forward import wrap_forward
from shardplan.runtime.parallel.reading import Reads
from shardplan.torchlib.private import private

ASYNC_DEVICES = ("cuda",)


class Compiled:
    """Wraps a module's forward: calls it in a compiled frame, which it may share with other modules."""

    def __init__(self, frame: Callable[..., Any]):
        self.frame = frame

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        return self.frame(forward, args, kwargs)


def _run(forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    return forward(*args, **kwargs)


class Frames:
    """A compiled frame for each kind of module in a model.

    torch.compile gives a code object up that it has compiled eight times (`torch._dynamo.config.recompile_limit`). Modules of one kind share
    their graphs; with one code object for all, a few kinds of blocks, trained at several lengths and evaluated, would reach the limit.
    """

    def __init__(self, section: Compile, backend: str | Inductor):
        self.compile = partial(torch.compile, fullgraph=section.fullgraph, backend=backend)
        self.of_kind: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def of(self, module: nn.Module) -> Callable[..., Any]:
        kind = _kind(module)
        if kind not in self.of_kind:
            # torch also learns which sizes change by the name of the code.
            code = _run.__code__.replace(co_name=f"{type(module).__name__}_{len(self.of_kind)}")
            self.of_kind[kind] = self.compile(FunctionType(code, _run.__globals__))
        return self.of_kind[kind]


def _kind(module: nn.Module) -> tuple[Any, ...]:
    """What modules have in common that run the same code: the classes of what is in them, and their switches. (Each layer may have a number
    and a name of its own that nothing reads.)"""
    return tuple(
        (name, type(part), *((key, value) for key, value in vars(part).items() if isinstance(value, bool | None)))
        for name, part in module.named_modules()
    )


def compile_modules(model: nn.Module, names: Iterable[str], section: Compile, tp: DeviceMesh | None) -> Fused | None:
    """Compile the forward of the named modules, each on its own.

    Args:
        tp: the one-dimensional tp mesh, if there is one.

    Returns:
        The fused operators, known once the modules have run; None without asynchronous tensor parallelism.

    Raises:
        ValueError: asynchronous tensor parallelism on devices that do not support it.
    """
    fused = None
    if section.async_tensor_parallel:
        assert tp is not None  # SP383
        if tp.device_type not in ASYNC_DEVICES:
            raise ValueError(f"async_tensor_parallel needs a mesh of CUDA devices, not of {tp.device_type}")
        enable_symmetric_memory(tp)
        fused = Fused()
        model.register_forward_hook(_warn_once(fused))
    backend = Inductor(fused) if tp is not None and section.backend == "inductor" else section.backend
    frames = Frames(section, backend)
    for name in names:
        module = model.get_submodule(name)
        # A block's graph gets its parameters as plain tensors: they are read outside of it.
        wrap_forward(module, Compiled(frames.of(module)), inside=Reads)
    return fused


def _warn_once(fused: Fused) -> Callable[..., None]:
    warned = False

    def look(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal warned
        if fused.graphs and not fused.fused and not warned:
            warned = True
            warnings.warn(
                "async_tensor_parallel: inductor fused no collective with a product, so the compiled modules run as "
                "without it (applied(model).async_collectives)",
                stacklevel=2,
            )

    return look


# Runs inductor's graphs below autograd.
#
# autograd has already processed a compiled graph, yet each operator call in it passes through autograd's part of the
# dispatcher. For torch's functional collectives that part is Python. So, although nothing is recorded, a sequence-parallel
# layer takes about 300 microseconds more (`python -m benchmarks.host`).
#
# Graphs from torch's cache of autograd graphs run unchanged. Our moves are autograd functions; graphs with these are cached
# only if somebody sets `autograd_cache_allow_custom_autograd_functions`.
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
