"""Changes of any code: one statement, condition, argument, number or element of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise

OPERATORS = ("statement", "condition", "compare", "arguments", "keyword", "number", "element", "early", "loop")

_COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_TOLD = {"cast", "TypeVar", "warn", "isinstance"}  # arguments that are types, or words for people


def changes(tree: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """(operator, a node, what stands in its place), in the order of the tree: of the bodies of functions, without annotations, texts
    and what only guards us against ourselves (`assert`)."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and (last := _last_statement(function)) is not None:
            yield "early", last, ast.Pass()
    inside = [
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.Lambda)
        for one in (function.body if isinstance(function.body, list) else [function.body])
        for node in _code(one)
    ]
    for node in dict.fromkeys(inside):
        yield from _of_node(node)


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """A node and what is in it."""
    if isinstance(node, ast.Assert | ast.JoinedStr) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, ast.AST):
                    yield from _code(one)


def _last_statement(function: ast.FunctionDef) -> ast.stmt | None:
    """Of a function that does several things and returns nothing: its last one, where the others do not end it."""
    returns = any(isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) for node in ast.walk(function))
    last = function.body[-1]
    return (
        last if not returns and len(function.body) > 2 and not isinstance(last, ast.Raise | ast.FunctionDef) else None
    )


def _of_node(node: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    match node:
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Delete():
            yield "statement", node, ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "statement", node, ast.Pass()
        case ast.BoolOp(op=op, values=values):
            yield "condition", node, ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), values)
        case ast.Compare(left=left, ops=[op], comparators=values):
            yield "compare", node, ast.Compare(left, [_COMPARED[type(op)]()], values)
        case ast.Call(func=function, args=args, keywords=keywords) if ast.unparse(function).split(".")[-1] not in _TOLD:
            for i, (one, other) in enumerate(pairwise(args)):
                fixed = any(isinstance(value, ast.Starred | ast.Constant) for value in (one, other))
                if not fixed and ast.unparse(one) != ast.unparse(other):
                    yield "arguments", node, ast.Call(function, [*args[:i], other, one, *args[i + 2 :]], keywords)
            for i in range(len(keywords)):
                yield "keyword", node, ast.Call(function, args, keywords[:i] + keywords[i + 1 :])
        case ast.Constant(value=value) if type(value) is int:
            yield "number", node, ast.Constant(value + 1)
        case ast.Tuple(elts=elements) | ast.List(elts=elements) if len(elements) > 1 and isinstance(node.ctx, ast.Load):
            yield "element", node, type(node)(elements[:-1], ast.Load())
        case ast.Set(elts=elements) if len(elements) > 1:
            yield "element", node, ast.Set(elements[:-1])
        case ast.For(body=body):
            once = ast.copy_location(ast.For(node.target, node.iter, [*body, ast.Break()], node.orelse), node)
            yield "loop", node, once
        case ast.If(test=test) if not isinstance(test, ast.Compare):
            turned = (
                test.operand
                if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
                else ast.UnaryOp(ast.Not(), test)
            )
            yield "condition", test, turned
        case ast.IfExp(test=test) if not isinstance(test, ast.Compare):
            yield "condition", test, ast.UnaryOp(ast.Not(), test)
