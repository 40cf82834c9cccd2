"""The source of a class's functions as trees."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType


def parsed(function: FunctionType | CodeType | ModuleType) -> ast.Module:
    """The source of a function or of a file; empty where it has no source file, or where its source is part of a line."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return ast.Module([], [])


def function_of(cls: type, name: str) -> FunctionType | None:
    """The function that a class, or a base of it, has under a name, without what wraps it."""
    found = inspect.getattr_static(cls, name, None)
    found = inspect.unwrap(found) if isinstance(found, FunctionType) else None
    return found if isinstance(found, FunctionType) else None


def methods(cls: type) -> Iterator[FunctionType]:
    """The functions of a class and of its bases; none of torch's classes."""
    own = cls.__module__.partition(".")[0] != "torch"
    names = sorted({name for base in cls.__mro__ for name in vars(base)} if own else ())
    yield from filter(None, (function_of(cls, name) for name in names))


def of_self(node: ast.AST) -> str | None:
    """The name of an attribute of `self`."""
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if is_own and isinstance(node, ast.Attribute) else None
