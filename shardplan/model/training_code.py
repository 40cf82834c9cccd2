"""Parameters of submodules that a module's code reads only in a branch for training.

A kernel that computes a layer together with its submodules takes their parameters as arguments (`mamba_inner_fn` and
`mamba_split_conv1d_scan_combined` of mamba_ssm); their own forwards do not run.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType

PARAMETERS = ("weight", "bias")


_FOUND: dict[type, tuple[str, ...]] = {}


def training_reads(cls: type) -> tuple[str, ...]:
    """The submodules of this class whose parameters its code passes to a function in a training-only branch: their
    names in it, sorted."""
    if cls not in _FOUND:
        own = cls.__module__.partition(".")[0] != "torch"
        names = {name for base in cls.__mro__ for name in vars(base)} if own else set()
        functions = (inspect.getattr_static(cls, name) for name in names)
        plain = (inspect.unwrap(one) for one in functions if isinstance(one, FunctionType))
        reads = (_read(one) for one in plain if isinstance(one, FunctionType) and _may_read(one))
        _FOUND[cls] = tuple(sorted(set().union(*reads)))
    return _FOUND[cls]


def _may_read(function: FunctionType) -> bool:
    names = function.__code__.co_names
    return "training" in names and any(one in names for one in PARAMETERS)


def _read(function: FunctionType) -> set[str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):  # the class has no source file, or its source is part of a line
        return set()
    branches = (node.body for node in ast.walk(tree) if isinstance(node, ast.If) and _is_training(node.test))
    calls = (node for body in branches for one in body for node in ast.walk(one) if isinstance(node, ast.Call))
    arguments = (one for call in calls for one in (*call.args, *(keyword.value for keyword in call.keywords)))
    return {child for argument in arguments for child in _children(argument)}


def _is_training(test: ast.expr) -> bool:
    """Whether a condition holds only in training: `self.training`, also together with further conditions."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(map(_is_training, test.values))
    return _of_self(test) == "training"


def _children(argument: ast.expr) -> Iterator[str]:
    """The submodules whose parameters an argument reads: `self.out_proj.weight`."""
    for node in ast.walk(argument):
        if isinstance(node, ast.Attribute) and node.attr in PARAMETERS and (child := _of_self(node.value)) is not None:
            yield child


def _of_self(node: ast.expr) -> str | None:
    """The name of an attribute of `self`."""
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if is_own and isinstance(node, ast.Attribute) else None
