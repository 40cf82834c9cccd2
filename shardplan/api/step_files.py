"""Checks of the file of a training step, before it runs."""

from __future__ import annotations

import ast
import os

from shardplan.core.mesh import MeshSizes
from shardplan.core.user_files import CannotRead, decode, read_bytes

MOST = 2**20  # bytes
FUNCTIONS = {"make": "make(model)", "step": "step(model, batches, state)"}


def check_step_file(path: str | os.PathLike[str], sizes: MeshSizes) -> None:
    """Raise ValueError for a file that cannot be read, is not Python or lacks one of the two functions, and for a mesh of one rank."""
    name = os.fspath(path)
    if sizes.world_size == 1:
        raise ValueError("a step (--step) is compared with one process: give a mesh of several ranks")
    try:
        tree = ast.parse(decode(read_bytes(path, MOST)), name)
    except CannotRead as error:
        raise ValueError(f"the step {name} {error.reason}") from None
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"the step {name} is no Python: {error}") from None
    named = {
        name.id
        if isinstance(name, ast.Name)
        else name.asname or name.name
        if isinstance(name, ast.alias)
        else name.name
        for name in ast.walk(tree)
        if isinstance(name, ast.Name | ast.alias | ast.FunctionDef)
    }
    for function, form in FUNCTIONS.items():
        if function not in named:
            raise ValueError(f"the step {name} has no function {form}")
