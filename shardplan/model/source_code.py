"""The source of a function as a tree."""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import CodeType, FunctionType


def parsed(function: FunctionType | CodeType) -> ast.Module:
    """A function's source; empty where it has no source file, or where its source is part of a line."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return ast.Module([], [])
