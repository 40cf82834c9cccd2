"""Wrapping a module's forward without changing a name: the module's class is replaced by a subclass.

Hooks stay outside of the wrapper, so activation checkpointing does not run a collective in a hook again. A forward that
was set on the instance (by a patching tool) runs inside.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

# around(forward, module, args, kwargs) -> output; `forward` is the wrapped function.
Around = Callable[[Callable[..., Any], nn.Module, tuple[Any, ...], dict[str, Any]], Any]

Wrapped = TypeVar("Wrapped")

_AROUND = "_shardplan_around"
_OWN = "_shardplan_own_forward"


_WRAPPED: dict[tuple[type[nn.Module], str], type[nn.Module]] = {}  # (class, why it is not compiled) -> its subclass


def _wrapped_class(cls: type[nn.Module], uncompiled: str) -> type[nn.Module]:
    key = cls, uncompiled
    return _WRAPPED.get(key) or _WRAPPED.setdefault(key, _subclass(cls, uncompiled))


def _subclass(cls: type[nn.Module], uncompiled: str) -> type[nn.Module]:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = self.__dict__
        call: Callable[..., Any] = own.get(_OWN) or functools.partial(cls.forward, self)
        wrappers = own[_AROUND]
        for around in wrappers[:-1]:
            call = functools.partial(_call, around, call, self)
        return wrappers[-1](call, self, args, kwargs)

    if uncompiled:
        # The whole call stays uncompiled: after a graph break further inside, torch.compile compiles every function around it
        # separately. Those functions belong to all modules, so it soon stops compiling one of them.
        forward = torch.compiler.disable(forward, reason=uncompiled)
    # The same name in the same module: libraries find classes by str(type(module)).
    namespace = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), namespace)


def _call(around: Around, forward: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return around(forward, module, args, kwargs)


def wrap_forward(module: nn.Module, around: Around, *, inside: type | None = None) -> None:
    """Put `around` around the module's forward: outside of earlier wrappers, but inside of wrappers of the type `inside`.

    An `around` with an attribute `uncompiled`, which says why, keeps torch.compile out of the module's whole forward.
    """
    uncompiled = getattr(around, "uncompiled", "")
    if _AROUND in module.__dict__:
        if uncompiled:
            module.__class__ = _wrapped_class(type(module).__mro__[1], uncompiled)
        before = module.__dict__[_AROUND]
        place = next((i for i, other in enumerate(before) if inside and isinstance(other, inside)), len(before))
        module.__dict__[_AROUND] = (*before[:place], around, *before[place:])
        return
    module.__dict__[_AROUND] = (around,)
    if "forward" in module.__dict__:  # it would hide the subclass's forward
        module.__dict__[_OWN] = module.__dict__.pop("forward")
    module.__class__ = _wrapped_class(type(module), uncompiled)


def around_of(module: nn.Module, kind: type[Wrapped]) -> Wrapped | None:
    """The wrapper of this type around the module's forward."""
    return next((one for one in module.__dict__.get(_AROUND, ()) if isinstance(one, kind)), None)


def is_own(module: nn.Module, cls: type[nn.Module], around: type) -> bool:
    """Whether a module is of this class, of no subclass, with its class's forward, and wrapped by one wrapper, of the type `around`."""
    wrappers = module.__dict__.get(_AROUND, ())
    return (
        len(wrappers) == 1
        and isinstance(wrappers[0], around)
        and type(module).__mro__[1] is cls
        and _OWN not in module.__dict__
    )


def arguments_of(module: nn.Module) -> tuple[str, ...]:
    """The names of the arguments of a module's forward, which may have been set on the instance."""
    return tuple(inspect.signature(module.__dict__.get(_OWN) or module.forward).parameters)
