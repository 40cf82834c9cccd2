"""Calls that torch's function modes do not see as one call: autograd.Function, torch.vmap and the derivatives of torch.func, scripted functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardplan.torchlib.private import private

Call = Callable[..., Any]
PULL_BACK = "_vjp_with_argnums"
DERIVATIVES = ("grad_impl", "grad_and_value_impl", "_jvp_with_argnums", PULL_BACK)  # of torch.func


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
    """Within this context, calls of autograd.Function, torch.vmap, the derivatives of torch.func and scripted functions go to the recorder."""
    # Patched below Function.apply, as code often keeps the bound method (`swiglu = SwiGLU.apply`). Where Function.apply is C code
    # itself (since torch 2.14) it is patched, and the operations of a method that was kept are recorded, as of a body that is opened.
    below = isinstance(vars(torch.autograd.Function)["apply"], classmethod)
    function: Any = private("FunctionBase") if below else torch.autograd.Function
    mapping = private("vmap_home")
    own = vars(function).get("apply")
    scripted: Any = torch.jit.ScriptFunction  # one of its methods is replaced
    call, vmap = scripted.__call__, mapping.vmap_impl
    derivatives = private("derivatives_home")
    kept = {name: getattr(derivatives, name) for name in DERIVATIVES}

    def applied(cls: type, *args: Any, **kwargs: Any) -> Any:
        apply = super(function, cls).apply
        return recorder.applied_function(cls.__name__, apply, args, kwargs)

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return recorder.scripted_function(self.name, lambda *a, **k: call(self, *a, **k), args, kwargs)

    def mapped(func: Call, in_dims: Any, out_dims: Any, randomness: str, chunk_size: Any, *args: Any, **kw: Any) -> Any:
        def run(*a: Any, **k: Any) -> Any:
            return vmap(func, in_dims, out_dims, randomness, chunk_size, *a, **k)

        return recorder.mapped_function("vmap", run, args, kw)

    def derived(name: str) -> Call:
        return lambda *args, **kwargs: recorder.mapped_function(name, kept[name], args, kwargs)

    def pulled_back(*args: Any, **kwargs: Any) -> Any:
        output, back, *more = recorder.mapped_function("vjp", kept[PULL_BACK], args, kwargs)

        def again(*cotangents: Any, **options: Any) -> Any:
            # The gradient depends on the values at which the function was called.
            return recorder.mapped_function("vjp", lambda given, _: back(*given, **options), (cotangents, args), {})

        return (output, again, *more)

    function.apply, scripted.__call__, mapping.vmap_impl = classmethod(applied), called, mapped
    for name in DERIVATIVES:
        setattr(derivatives, name, pulled_back if name == PULL_BACK else derived(name))
    try:
        yield
    finally:
        if own is None:
            del function.apply
        else:
            function.apply = own
        scripted.__call__, mapping.vmap_impl = call, vmap
        for name, one in kept.items():
            setattr(derivatives, name, one)
