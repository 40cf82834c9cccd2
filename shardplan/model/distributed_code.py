"""Code of a model that asks torch for its rank, or communicates: a reduced model runs without it, as there is no process group."""

from __future__ import annotations

import ast
import dis
import inspect
import re
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType

import torch.distributed
from torch import nn

from .adapters import is_wrapper
from .reduced.trace import SourceLine
from .source_code import parsed

WORLD = "WORLD"
ASKS = re.compile(
    rf"get_rank|get_world_size|is_initialized|{WORLD}|(all_|reduce|gather|scatter|broadcast|send|recv|barrier)\w*"
)
OF_A_GROUP = ("get_rank", "get_world_size", "barrier")  # functions whose first argument is the group

LONGEST = 4  # names after `torch` in a path to such a function


def asking(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The modules whose constructor or forward asks, one of each class: (its name, the line of code). Torch's own (SyncBatchNorm) count
    on it, and peft's ask only where adapters are added."""
    seen: set[type] = set()
    for name, module in model.named_modules():
        cls: type = type(module)
        if not (cls in seen or is_wrapper(module) or _in(cls.__module__, "torch")):
            seen.add(cls)
            if (line := asked_in(cls)) is not None:
                yield name, line


@cache
def asked_in(cls: type) -> str | None:
    """The first line in the constructors and in the forward of a class, or in what they call, that asks; None where none does. Code of
    other packages than the class's is not looked at. A line that names the group that it asks does not count: without one it does not
    run, and a module that holds one is not proven, as no copy of it can be made (SP524)."""
    package = cls.__module__.rpartition(".")[0] or cls.__module__
    constructors = (vars(base).get("__init__") for base in cls.__mro__ if _in(base.__module__, package))
    queue = [one for one in (*constructors, getattr(cls, "forward", None)) if isinstance(one, FunctionType)]
    for function in queue:
        function = inspect.unwrap(function)
        uses = list(_uses(function.__code__))
        names = [name for _, name in uses]
        lines = dict.fromkeys(uses[at][0] for at in range(len(uses)) if _asks(function, names, at))
        if (line := next((one for one in lines if not _of_given_groups(function, one)), None)) is not None:
            return SourceLine(function.__code__.co_filename, line).shown
        for name in dict.fromkeys(names):
            for found in (inspect.getattr_static(cls, name, None), function.__globals__.get(name)):
                if isinstance(found, FunctionType) and _in(found.__module__, package) and found not in queue:
                    queue.append(found)
    return None


def _in(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def _asks(function: FunctionType, names: list[str], at: int) -> bool:
    """Whether the use of a name is one of torch.distributed: `dist.get_rank`, `torch.distributed.nn.functional.all_gather`, `get_rank`."""
    value, after = function.__globals__.get(names[at]), names[at + 1 : at + 1 + LONGEST]
    if value is torch.distributed or (value is torch and after[:1] == ["distributed"]):
        return any(map(ASKS.fullmatch, after))
    if not isinstance(value, FunctionType) or not _in(value.__module__, "torch.distributed"):
        return False
    return ASKS.fullmatch(value.__name__) is not None


def _of_given_groups(function: FunctionType, line: int) -> bool:
    """Whether all calls in a line name the group that they ask, as in torchtitan's Embedding."""
    at = line - function.__code__.co_firstlineno + 1
    calls = [node for node in ast.walk(parsed(function)) if isinstance(node, ast.Call) and node.lineno == at]
    named = [(ast.unparse(call.func).rpartition(".")[2], call) for call in calls]
    asking = [(name, call) for name, call in named if ASKS.fullmatch(name)]
    return bool(asking) and all(_names_group(*one) for one in asking)


def _names_group(name: str, call: ast.Call) -> bool:
    given = [one.value for one in call.keywords if one.arg == "group"] + (call.args[:1] if name in OF_A_GROUP else [])
    return any(not isinstance(one, ast.Constant) and WORLD not in ast.unparse(one) for one in given)


def _uses(code: CodeType) -> Iterator[tuple[int, str]]:
    """Each use of a name, in the order of the code, with its line in the file."""
    for one in dis.get_instructions(code):
        if one.opname.startswith("LOAD") and isinstance(one.argval, str) and one.positions is not None:
            yield one.positions.lineno or 0, one.argval
        elif isinstance(one.argval, CodeType):  # a comprehension, or a function inside
            yield from _uses(one.argval)
