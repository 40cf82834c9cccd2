"""What a module's code reads in a branch, or before it: parameters of submodules for training alone, and probabilities.

A kernel that computes a layer together with its submodules takes their parameters as arguments (`mamba_inner_fn` and
`mamba_split_conv1d_scan_combined` of mamba_ssm); their own forwards do not run. Other code drops elements only where a
probability is above 0 (`if self.p > 0: x = self.dropout(x)`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import FunctionType

from .forward_code import forward_reads
from .source_code import methods, of_self, parsed

PARAMETERS = ("weight", "bias")


_FOUND: dict[type, tuple[str, ...]] = {}
_ASKED: dict[type, frozenset[str]] = {}


def training_reads(cls: type) -> tuple[str, ...]:
    """The submodules of this class whose parameters its code passes to a function in a training-only branch: their
    names in it, sorted."""
    if cls not in _FOUND:
        reads = (_read(one) for one in methods(cls) if _may_read(one))
        _FOUND[cls] = tuple(sorted(set().union(*reads)))
    return _FOUND[cls]


def asked_before(cls: type) -> frozenset[str]:
    """The attributes of `self`, as paths (`p`, `dropout.p`), that conditions in this class's forward read, and in what it calls."""
    if cls not in _ASKED:
        running = {"forward", *forward_reads(cls)}
        code = (parsed(function) for function in methods(cls) if function.__name__ in running)
        nodes = (node for tree in code for node in ast.walk(tree))
        tests = (node.test for node in nodes if isinstance(node, (ast.If, ast.IfExp)))
        read = (ast.unparse(node) for test in tests for node in ast.walk(test) if isinstance(node, ast.Attribute))
        _ASKED[cls] = frozenset(path.removeprefix("self.") for path in read if path.startswith("self."))
    return _ASKED[cls]


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
