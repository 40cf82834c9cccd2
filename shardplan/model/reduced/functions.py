"""Calls that torch's function modes do not see as one call: autograd.Function, torch.vmap, scripted functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardplan.torchlib.private import private

Call = Callable[..., Any]


class Calls(Protocol):
    """Records such calls. Each method receives the name, the call, its positional arguments and its keyword arguments."""

    def applied_function(self, name: str, call: Call, args: tuple, kwargs: dict) -> Any: ...

    def mapped_function(self, name: str, call: Call, args: tuple, kwargs: dict) -> Any: ...

    def scripted_function(self, name: str, call: Call, args: tuple, kwargs: dict) -> Any: ...


@dataclass(slots=True)
class Body:
    """The running body of an autograd.Function. Its operations are recorded, and dropped if the function counts as one
    operation.

    Args:
        scope: the calling module, and the number of the module's call.
        label: the position of the function's call in the module's code.
        start: the number of positions before the body.
        given: the values passed to the function.
        known: the number of values before the body.
        opened: it runs modules of the model, or reads values that were not passed to it, so its operations stay recorded.
    """

    scope: tuple[str, int]
    label: int | str
    start: int
    given: frozenset[int]
    known: int
    opened: bool = False


@contextmanager
def functions_of(recorder: Calls) -> Iterator[None]:
    """Within this context, calls of autograd.Function, torch.vmap and scripted functions go to the recorder."""
    # Patched below Function.apply, as code often keeps the bound method (`swiglu = SwiGLU.apply`).
    function, mapping = private("FunctionBase"), private("vmap_home")
    scripted: Any = torch.jit.ScriptFunction  # one of its methods is replaced
    call, vmap = scripted.__call__, mapping.vmap_impl

    def applied(cls: type, *args: Any, **kwargs: Any) -> Any:
        apply = super(function, cls).apply
        return recorder.applied_function(cls.__name__, apply, args, kwargs)

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return recorder.scripted_function(self.name, lambda *a, **k: call(self, *a, **k), args, kwargs)

    def mapped(func: Call, in_dims: Any, out_dims: Any, randomness: str, chunk_size: Any, *args: Any, **kw: Any) -> Any:
        def run(*a: Any, **k: Any) -> Any:
            return vmap(func, in_dims, out_dims, randomness, chunk_size, *a, **k)

        return recorder.mapped_function("vmap", run, args, kw)

    function.apply, scripted.__call__, mapping.vmap_impl = classmethod(applied), called, mapped
    try:
        yield
    finally:
        del function.apply
        scripted.__call__, mapping.vmap_impl = call, vmap
