"""The children that a module's own flags switch off: its code reads them only in branches that do not run."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torch import nn

from .forward_code import names_in
from .source_code import methods, of_self, parsed


def switched_off(module: nn.Module) -> frozenset[str]:
    """The children and parameters that a module's code reads only in branches for which its plain attributes decide
    (`if self.with_cross_attention:`), all against them. What the code does not read by name is not among them."""
    own = {name for name, _ in (*module.named_children(), *module.named_parameters(recurse=False))}
    code = (parsed(one) for one in methods(type(module)) if not own.isdisjoint(names_in(one.__code__)))
    reads = [read for tree in code for read in _reads(module, tree, runs=True)]
    return frozenset(own.intersection(name for name, _ in reads) - {name for name, runs in reads if runs})


def _reads(module: nn.Module, node: ast.AST, *, runs: bool) -> Iterator[tuple[str, bool]]:
    """The attributes that code reads, each with whether it may run."""
    if isinstance(node, (ast.If, ast.IfExp)):
        holds = _value(module, node.test)
        yield from _reads(module, node.test, runs=runs)
        for branch, skipped in ((node.body, False), (node.orelse, True)):
            for code in branch if isinstance(branch, list) else [branch]:
                yield from _reads(module, code, runs=runs and holds is not skipped)
        return
    name = of_self(node)
    if name is not None and isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield name, runs
    for one in ast.iter_child_nodes(node):
        yield from _reads(module, one, runs=runs)


def _value(module: nn.Module, test: ast.expr) -> bool | None:
    """Whether a condition holds; None where more than the module's flags decides."""
    match test:
        case ast.UnaryOp(ast.Not(), operand):
            value = _value(module, operand)
            return None if value is None else not value
        case ast.BoolOp(sign, values):
            known = [_value(module, one) for one in values]
            decides = isinstance(sign, ast.Or)
            if decides in known:
                return decides
            return None if None in known else not decides
        case ast.Compare(asked, [ast.Is() | ast.IsNot() as sign], [ast.Constant(None)]):
            flag = getattr(module, of_self(asked) or "", ...)
            return None if flag is ... else (flag is None) is isinstance(sign, ast.Is)
    name = of_self(test)
    flag = vars(module).get(name, ...) if name not in (None, "training") else ...
    if flag is None:
        return False
    return flag if isinstance(flag, bool) else None
