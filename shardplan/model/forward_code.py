"""The arguments and attributes that a module's forward reads; a number that only its constructor reads does not count."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType
from typing import Any

from torch import nn

from .source_code import function_of


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the arguments of a module's forward."""
    return tuple(parameters_of(module))


def only_arguments(module: nn.Module) -> tuple[str, ...] | None:
    """The same; None where forward also takes arguments of any other name, or is not Python code."""
    try:
        found = parameters_of(module)
    except (TypeError, ValueError):
        return None
    return None if any(one.kind is one.VAR_KEYWORD for one in found.values()) else tuple(found)


def parameters_of(module: nn.Module) -> dict[str, inspect.Parameter]:
    """The parameters of a module's forward, without the module itself."""
    if "forward" in vars(module):  # set on the instance
        return dict(inspect.signature(module.forward).parameters)
    return _of_function(type(module).forward)


@cache
def _of_function(forward: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(list(inspect.signature(forward).parameters.items())[1:])


def forward_reads(cls: type) -> frozenset[str]:
    """The attribute names that a class's `forward`, and the methods that it calls, read: its own attributes and those of others."""
    names: dict[str, None] = {}
    queue = ["forward"]
    for method in queue:
        function = function_of(cls, method)
        for name in () if function is None else names_in(function.__code__):
            if name not in names:
                names[name] = None
                queue.append(name)
    return frozenset(names)


def names_in(code: CodeType) -> Iterator[str]:
    """The names of attributes and globals in a function's code."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # a comprehension, or a function inside
            yield from names_in(constant)
