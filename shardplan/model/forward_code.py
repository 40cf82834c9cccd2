"""What a module's code reads while it runs: a number of a module that only its constructor reads counts nothing there."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType


def forward_reads(cls: type) -> frozenset[str]:
    """The names that `forward` of a class, and those of its methods that it calls, read: of attributes, its own and others'."""
    names: dict[str, None] = {}
    queue = ["forward"]
    for method in queue:
        function = inspect.getattr_static(cls, method, None)
        function = inspect.unwrap(function) if isinstance(function, FunctionType) else function
        if not isinstance(function, FunctionType):
            continue
        for name in _names(function.__code__):
            if name not in names:
                names[name] = None
                queue.append(name)
    return frozenset(names)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # a comprehension, or a function inside
            yield from _names(constant)
