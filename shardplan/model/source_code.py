"""The source of a class's functions as trees."""

from __future__ import annotations

import ast
import inspect
import logging
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

INSTALLED = (str(Path(logging.__file__).parent.parent), str(Path(__file__).parents[1]), "<frozen")
PACKAGES = ("/site-packages/", "/dist-packages/")


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


@cache
def is_own(file: str) -> bool:
    """Whether code is in a file of the user's, not of an installed package."""
    return not file.startswith(INSTALLED) and not any(one in file for one in PACKAGES) and not _in_a_target(Path(file))


def _in_a_target(file: Path) -> bool:
    """Whether `pip install --target` wrote a file: a list of files next to its outermost package folder then names this folder."""
    outermost = file
    while (outermost.parent / "__init__.py").is_file():
        outermost = outermost.parent
    return outermost != file and outermost.name in _installed_in(outermost.parent)


@cache
def _installed_in(folder: Path) -> frozenset[str]:
    """The files and folders that pip recorded as installed in a folder."""
    lists = (one.read_text().splitlines() for one in folder.glob("*.dist-info/RECORD"))
    return frozenset(line.partition("/")[0] for lines in lists for line in lines)
