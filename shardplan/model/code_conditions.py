"""The flags of modules, and the children that they switch off: code reads them only in branches that do not run."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from functools import cache

from torch import nn

from .forward_code import names_in
from .source_code import is_own, methods, of_self, parsed

WALKS = frozenset(("children", "named_children", "modules", "named_modules", "_modules", "get_submodule"))
Flag = Callable[[str | None], object]  # what an attribute is; ... for one that more than a constructor decides about
Names = frozenset[tuple[type[ast.expr_context], str]]
UNREAD = (ast.expr_context, "")  # in place of all names of a file that cannot be read


def switched_off(module: nn.Module, model: nn.Module) -> frozenset[str]:
    """The children and parameters that a module's code reads only in branches for which its plain attributes decide
    (`if self.with_cross_attention:`), all against them. What the code does not read by name is not among them, nor is what other code may
    read. An attribute that is set outside of constructors decides nothing.

    Args:
        model: the model that it is a part of; the files of its classes are read.
    """
    own = {name for name, _ in (*module.named_children(), *module.named_parameters(recurse=False))}
    functions = [one for one in methods(type(module)) if getattr(nn.Module, one.__name__, None) is not one]
    code = (parsed(one) for one in functions if not (own | WALKS).isdisjoint(names_in(one.__code__)))
    elsewhere = Names().union(*map(_elsewhere, {type(one).__module__ for one in model.modules()}))

    def flag(name: str | None) -> object:
        free = name in (None, "training") or (ast.Store, name) in elsewhere or hasattr(type(module), str(name))
        return ... if free else getattr(module, str(name), ...)

    reads = [read for tree in code for read in _reads(flag, tree, runs=True)]
    run = {name for name, runs in reads if runs} | {name for context, name in elsewhere if context is ast.Load}
    unseen = UNREAD in elsewhere or "forward" in vars(module) or not WALKS.isdisjoint(name for name, _ in reads)
    return frozenset(() if unseen else own.intersection(name for name, _ in reads) - run)


def flags(module: nn.Module) -> dict[str, bool | str | None]:
    """The attributes of a module that are True, False, None or a word, that its functions in the user's own files read, and that no code of
    its file sets outside of constructors."""
    cls: type = type(module)
    read, found = _read_alone(cls), vars(module)
    return {
        name: found[name] for name in read & found.keys() if found[name] is None or isinstance(found[name], (bool, str))
    }


@cache
def _read_alone(cls: type) -> frozenset[str]:
    """The names that functions of a class read in the user's own files, and that no code of these sets outside of constructors."""
    own = [one for one in methods(cls) if one.__name__ != "__init__" and is_own(one.__code__.co_filename)]
    elsewhere = Names().union(*map(_elsewhere, {one.__module__ for one in own}))
    read = {name for one in own for name in names_in(one.__code__) if (ast.Store, name) not in elsewhere}
    return frozenset() if UNREAD in elsewhere else frozenset(read - {"training"})


@cache
def _elsewhere(name: str) -> Names:
    """The names that the file of a class reads of anything but `self` (`layer.gate`, `getattr(layer, "gate")`), and those that it sets outside
    of constructors; none of torch's."""
    torchs = name.partition(".")[0] == "torch"
    file = parsed(sys.modules[name]) if name in sys.modules and not torchs else ast.Module([], [])
    found: set[tuple[type[ast.expr_context], str]] = set() if torchs or file.body else {UNREAD}
    nodes: list[ast.AST] = [file]
    for node in nodes:
        made = isinstance(node, ast.FunctionDef) and node.name == "__init__"
        for one in (one for one in ast.walk(node) if of_self(one) is None) if made else (node,):
            if isinstance(one, ast.Attribute) and (of_self(one) is None or isinstance(one.ctx, ast.Store)):
                found.add((type(one.ctx), one.attr))
            elif isinstance(one, ast.Constant) and isinstance(one.value, str):
                found |= {(ast.Load, one.value), (ast.Store, one.value)}
        nodes += () if made else ast.iter_child_nodes(node)
    return frozenset(found)


def _reads(flag: Flag, node: ast.AST, *, runs: bool) -> Iterator[tuple[str, bool]]:
    """The attributes that code reads, each with whether it may run."""
    if isinstance(node, (ast.If, ast.IfExp)):
        holds = _value(flag, node.test)
        yield from _reads(flag, node.test, runs=runs)
        for branch, skipped in ((node.body, False), (node.orelse, True)):
            for code in branch if isinstance(branch, list) else [branch]:
                yield from _reads(flag, code, runs=runs and holds is not skipped)
        return
    name = of_self(node)
    if name is not None and isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield name, runs
    for one in ast.iter_child_nodes(node):
        yield from _reads(flag, one, runs=runs)


def _value(flag: Flag, test: ast.expr) -> bool | None:
    """Whether a condition holds; None where more than the module's flags decides."""
    match test:
        case ast.UnaryOp(ast.Not(), operand):
            value = _value(flag, operand)
            return None if value is None else not value
        case ast.BoolOp(sign, values):
            known = [_value(flag, one) for one in values]
            decides = isinstance(sign, ast.Or)
            if decides in known:
                return decides
            return None if None in known else not decides
        case ast.Compare(asked, [ast.Is() | ast.IsNot() as sign], [ast.Constant(None)]):
            found = flag(of_self(asked))
            return None if found is ... else (found is None) is isinstance(sign, ast.Is)
    found = flag(of_self(test))
    if found is None:
        return False
    return found if isinstance(found, bool) else None
