"""Wrapping a module's forward without changing a name: the module's class is replaced by a subclass.

Hooks stay outside what is wrapped, so a collective in a hook is not run again by activation checkpointing. A forward that
was set on the instance (by a patching tool) is what runs inside.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

# around(forward, module, args, kwargs) -> output; `forward` is the wrapped function.
Around = Callable[[Callable[..., Any], nn.Module, tuple[Any, ...], dict[str, Any]], Any]

_AROUND = "_shardplan_around"
_OWN = "_shardplan_own_forward"


_WRAPPED: dict[type[nn.Module], type[nn.Module]] = {}  # class -> its subclass


def _wrapped_class(cls: type[nn.Module]) -> type[nn.Module]:
    return _WRAPPED.get(cls) or _WRAPPED.setdefault(cls, _subclass(cls))


def _subclass(cls: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = self.__dict__.get(_OWN) or functools.partial(cls.forward, self)
        for around in self.__dict__[_AROUND]:
            call = functools.partial(_call, around, call, self)
        return call(*args, **kwargs)

    # The same name in the same module: libraries look classes up by str(type(module)).
    namespace = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), namespace)


def _call(around: Around, forward: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return around(forward, module, args, kwargs)


def wrap_forward(module: nn.Module, around: Around, *, inside: type | None = None) -> None:
    """Put `around` around the module's forward, outside what was put there before, but inside what is of the type `inside`."""
    if _AROUND in module.__dict__:
        before = module.__dict__[_AROUND]
        place = next((i for i, other in enumerate(before) if inside and isinstance(other, inside)), len(before))
        module.__dict__[_AROUND] = (*before[:place], around, *before[place:])
        return
    module.__dict__[_AROUND] = (around,)
    if "forward" in module.__dict__:  # it would hide the subclass's
        module.__dict__[_OWN] = module.__dict__.pop("forward")
    module.__class__ = _wrapped_class(type(module))


def arguments_of(module: nn.Module) -> tuple[str, ...]:
    """The names of the arguments of a module's forward, which may be one that was set on the instance."""
    return tuple(inspect.signature(module.__dict__.get(_OWN) or module.forward).parameters)
