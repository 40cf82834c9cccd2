"""Parameters of submodules that a module's code reads only in a branch for training.

A kernel that computes a layer together with its submodules takes their parameters as arguments (`mamba_inner_fn` and
`mamba_split_conv1d_scan_combined` of mamba_ssm); their own forwards do not run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from types import FunctionType

from .source_code import methods, of_self, parsed

PARAMETERS = ("weight", "bias")


@cache
def training_reads(cls: type) -> tuple[str, ...]:
    """The submodules of this class whose parameters its code passes to a function in a training-only branch: their
    names in it, sorted."""
    reads = (_read(one) for one in methods(cls) if _may_read(one))
    return tuple(sorted(set().union(*reads)))


def _may_read(function: FunctionType) -> bool:
    names = function.__code__.co_names
    return "training" in names and any(one in names for one in PARAMETERS)


def _read(function: FunctionType) -> set[str]:
    branches = (
        node.body for node in ast.walk(parsed(function)) if isinstance(node, ast.If) and _is_training(node.test)
    )
    calls = (node for body in branches for one in body for node in ast.walk(one) if isinstance(node, ast.Call))
    arguments = (one for call in calls for one in (*call.args, *(keyword.value for keyword in call.keywords)))
    return {child for argument in arguments for child in _children(argument)}


def _is_training(test: ast.expr) -> bool:
    """Whether a condition holds only in training: `self.training`, also together with further conditions."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(map(_is_training, test.values))
    return of_self(test) == "training"


def _children(argument: ast.expr) -> Iterator[str]:
    """The submodules whose parameters an argument reads: `self.out_proj.weight`."""
    for node in ast.walk(argument):
        if isinstance(node, ast.Attribute) and node.attr in PARAMETERS and (child := of_self(node.value)) is not None:
            yield child
