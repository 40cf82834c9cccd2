"""Branches of the user's own code that a reduced model does not take. The code compares a length, a width, a layer's number or a count of
its calls with a constant, and reduced models are short, narrow, have few layers and run few steps. With another constant the reduced model
takes the other branch, which is proven too."""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from shardplan.core.diagnostics import Code, Diagnostic, Severity
from shardplan.core.search_bounds import BOUNDS
from shardplan.model.reduced import ReducedModel
from shardplan.model.source_code import parsed

from .fingerprints import is_own

UNTAKEN = Code("SP423")
OPERATORS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
MIRRORED: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt,
    ast.Gt: ast.Lt,
    ast.LtE: ast.GtE,
    ast.GtE: ast.LtE,
}
MARK = "shardplan compares "

Place = tuple[str, int, int]  # file, line, column
Others = Mapping[Place, float]  # a comparison -> the number that replaces its constant


@dataclass(frozen=True)
class OtherSides:
    """The sides of comparisons that a reduced model does not take.

    Args:
        models: reduced models that take other sides, each with the lines of these comparisons.
        untaken: the lines of comparisons with a side that cannot be taken.
    """

    models: tuple[tuple[ReducedModel, tuple[str, ...]], ...] = ()
    untaken: tuple[str, ...] = ()

    def warning(self) -> tuple[Diagnostic, ...]:
        """SP423, if there are any such lines."""
        if not self.untaken:
            return ()
        return (
            Diagnostic(
                code=UNTAKEN,
                severity=Severity.WARNING,
                message=f"no proof takes both branches of {len(self.untaken)} comparison{'s' * (len(self.untaken) > 1)} in the model's code",
                notes=self.untaken,
                help="pass `inputs` or `reduced` with which the code takes the branch that the model takes in training",
            ),
        )


@dataclass(eq=False)  # it is a constant of code, which must be hashable
class _Side:
    """A comparison while the model runs. It replaces the comparison, and is called with both operands.

    Args:
        varies: whether the operand is known to differ in the model itself; else it counts if it is a length of the inputs.
        width: whether the operand is the same share on all ranks of a model of any size, unlike a length.
        counts: whether the module's own code changes the operand from call to call.
        real: whether the operand may be a fraction, as of a length.
        other: the number that replaces the constant.
    """

    place: Place
    line: str
    compare: type[ast.cmpop]
    varies: bool
    width: bool
    counts: bool = False
    real: bool = False
    other: float | None = None
    seen: list[tuple[float, bool]] = field(default_factory=list)

    def __call__(self, operand: Any, constant: Any) -> Any:
        number = operand.item() if self.counts and isinstance(operand, Tensor) and operand.ndim == 0 else operand
        known = (int, float) if self.counts or self.real else (int,)
        if type(number) not in known or type(constant) not in known:
            return OPERATORS[self.compare](operand, constant)
        result = OPERATORS[self.compare](number, constant if self.other is None else self.other)
        self.seen.append((number, result))
        return result if number is operand else torch.tensor(result)

    def flipped(self) -> float | None:
        """A constant that makes it take the other branch; None where it took both, or neither."""
        if len({result for _, result in self.seen}) != 1:
            return None
        values, result = [value for value, _ in self.seen], self.seen[0][1]
        above, below = max(values) + 1, -1 if self.width else max(values) - 1
        match self.compare(), result:
            case (ast.Eq(), False) | (ast.NotEq(), True):
                return values[-1]
            case (ast.Gt(), False) | (ast.GtE(), False):
                return below if self.width or self.compare is ast.Gt else below + 1
            case (ast.Lt(), True) | (ast.LtE(), True):
                return (0 if self.width else min(values)) - (self.compare is ast.LtE)
            case _:
                return above


def other_sides(model: ReducedModel, built: nn.Module) -> OtherSides:
    """Reduced models that take the branches that this one does not take, where they run.

    Args:
        built: the model that `model` builds; it is not changed.
    """
    unread = _unread(built)
    if not _instrument(built, {}, shrunk=model.config is not None, in_place=False):
        return OtherSides((), unread)
    taken: dict[Place, set[bool]] = {}
    lines: dict[Place, str] = {}
    made: list[tuple[ReducedModel, tuple[str, ...]]] = []
    others: dict[Place, float] = {}
    failing: set[Place] = set()
    for _ in range(BOUNDS.branches):
        sides = _observed(model, others) or []
        for side in sides:
            taken.setdefault(side.place, set()).update(result for _, result in side.seen)
            lines[side.place] = side.line
        chosen = ((side.place, side.flipped()) for side in sides if len(taken[side.place]) == 1)
        new = {place: other for place, other in chosen if other is not None and place not in others.keys() | failing}
        if new and _observed(model, others | new) is None:  # first together
            failing |= {place for place in new if _observed(model, {**others, place: new[place]}) is None}
            new = {place: other for place, other in new.items() if place not in failing}
            if new and _observed(model, others | new) is None:
                failing |= new.keys()
                new = {}
        if not new:
            break
        others |= new
        made.append(
            (replace(model, maker=partial(_with, model, dict(others))), tuple(lines[place] for place in others))
        )
    return OtherSides(tuple(made), tuple(sorted({*(lines[place] for place in failing), *unread})))


def _with(model: ReducedModel, others: Others) -> nn.Module:
    built = model.build()
    _instrument(built, others, shrunk=model.config is not None)
    return built


def _unread(built: nn.Module) -> tuple[str, ...]:
    """The functions that compare a length but cannot be replaced: without source, with decorators, or global functions of a module."""
    methods = {function.__code__: function for module in built.modules() for _, function in _functions(module)}
    wrapped = (one for module in built.modules() for _, one in _functions(module, unwrapped=True))
    queue = {one.__code__: one for one in wrapped}
    pending = list(queue.values())
    for function in pending:
        named = (function.__globals__.get(name) for name in function.__code__.co_names)
        for one in named:
            if isinstance(one, FunctionType) and is_own(one.__code__.co_filename) and one.__code__ not in queue:
                queue[one.__code__] = one
                pending.append(one)
    return tuple(
        f"{code.co_filename}:{code.co_firstlineno}: {code.co_name}"
        for code, function in queue.items()
        if (code not in methods or (node := _node(function)) is None or node.decorator_list)
        and {"shape", "size"}.intersection(code.co_names)
        and any(one.opname in ("COMPARE_OP", "CONTAINS_OP") for one in dis.get_instructions(code))
    )


def _observed(model: ReducedModel, others: Others) -> list[_Side] | None:
    """The comparisons that the model's forwards make, on each kind of input; None where one raises."""
    built = model.build()
    sides = _instrument(built, others, shrunk=model.config is not None)
    lengths: set[int] = set()
    for kind in model.kinds if sides else ():
        inputs = model.inputs(kind=kind)
        for value in inputs.values():
            if isinstance(value, Tensor):
                lengths |= set(value.shape[:-1] if value.is_floating_point() else value.shape)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                built(**inputs)
        except Exception:  # from the model's code, in a branch not made for these inputs
            return None
    merged: dict[Place, _Side] = {}
    for side in sides:
        merged.setdefault(side.place, side).seen.extend(side.seen if side is not merged[side.place] else ())
    return [one for one in merged.values() if one.seen and (one.varies or all(v in lengths for v, _ in one.seen))]


def _functions(module: nn.Module, *, unwrapped: bool = False) -> Iterator[tuple[str, FunctionType]]:
    """The user's own functions among a module's methods and attributes.

    Args:
        unwrapped: include functions inside decorators.
    """
    found: dict[str, Any] = {}
    for base in reversed(type(module).__mro__):
        found |= {name: one for name, one in vars(base).items() if not name.startswith("__")}
    for name, one in (found | vars(module)).items():
        function = one.__func__ if isinstance(one, MethodType) else one
        if unwrapped and isinstance(function, FunctionType):
            function = inspect.unwrap(function)
        if isinstance(function, FunctionType) and is_own(function.__code__.co_filename):
            yield name, function


def _instrument(model: nn.Module, others: Others, *, shrunk: bool, in_place: bool = True) -> list[_Side]:
    """Replace the user's own functions of all modules by functions that record comparisons; or only find them, if not `in_place`."""
    sides: list[_Side] = []
    for module in model.modules():
        functions = list(_functions(module))
        counters = frozenset(name for _, function in functions for name in _written(function.__code__))
        for name, function in functions:
            found: list[_Side] = []
            changed = _changed(function, found, counters, shrunk=shrunk)
            if changed is not None and found:
                for side in found:
                    side.other = others.get(side.place)
                sides += found
                # a function set on the instance knows its module, or is a method of it
                if in_place:
                    own = vars(module).get(name)
                    vars(module)[name] = changed if isinstance(own, FunctionType) else MethodType(changed, module)
    return sides


def _node(function: FunctionType) -> ast.FunctionDef | None:
    """A function's definition in its file; None for one without a file, and for a part of a line."""
    node = next(iter(parsed(function).body), None)
    if not isinstance(node, ast.FunctionDef):
        return None
    first = node.decorator_list[0].lineno if node.decorator_list else node.lineno
    return ast.increment_lineno(node, function.__code__.co_firstlineno - first)


@cache
def _written(code: CodeType) -> frozenset[str]:
    """The attributes of its module that a function changes: by assignment, or by a tensor's in-place method (`self.calls.add_(1)`)."""
    written: set[str] = set()
    for one in ast.walk(parsed(code)):
        targets: list[ast.expr] = one.targets if isinstance(one, ast.Assign) else []
        if isinstance(one, ast.AugAssign):
            targets = [one.target]
        elif isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr.endswith("_"):
            targets = [one.func.value]
        written |= {target.attr for target in targets if isinstance(target, ast.Attribute) and _of_self(target)}
    return frozenset(written)


def _changed(
    function: FunctionType, found: list[_Side], counters: frozenset[str], *, shrunk: bool
) -> FunctionType | None:
    """The same function with a call of a `_Side` instead of each comparison with a constant.

    Args:
        counters: attributes that the module's functions change.
    """
    node, code = _node(function), function.__code__
    if node is None or node.decorator_list:
        return None
    _Comparisons(node, code, found, counters, shrunk=shrunk).visit(node)
    if not found:
        return None
    arguments = ast.arguments([], [ast.arg(name) for name in code.co_freevars], None, [], [], None, [])
    outer = ast.FunctionDef("outer", arguments, [node], [], None, None)
    if hasattr(ast, "TypeAlias"):  # Python 3.12
        outer.type_params = []  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # a string is called
        made = compile(ast.fix_missing_locations(ast.Module([outer], [])), code.co_filename, "exec")
    inner = _inner(_inner(made, "outer"), node.name)
    if inner.co_freevars != code.co_freevars:
        return None
    new = FunctionType(
        _with_sides(inner, found), function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    new.__kwdefaults__ = function.__kwdefaults__
    new.__dict__.update(vars(function))
    return new


def _inner(code: CodeType, name: str) -> CodeType:
    return next(one for one in code.co_consts if isinstance(one, CodeType) and one.co_name == name)


def _with_sides(code: CodeType, found: list[_Side]) -> CodeType:
    def exchanged(constant: Any) -> Any:
        if isinstance(constant, CodeType):
            return _with_sides(constant, found)
        if isinstance(constant, str) and constant.startswith(MARK):
            return found[int(constant.removeprefix(MARK))]
        return constant

    return code.replace(co_consts=tuple(map(exchanged, code.co_consts)))


class _Comparisons(ast.NodeTransformer):
    """Replaces the comparisons in a function's code."""

    def __init__(
        self, function: ast.FunctionDef, code: CodeType, found: list[_Side], counters: frozenset[str], *, shrunk: bool
    ):
        self.file, self.found, self.counters, self.shrunk = code.co_filename, found, counters, shrunk
        inside = (node for node in ast.walk(function) if isinstance(node, ast.arg | ast.Name))
        bound = {node.arg if isinstance(node, ast.arg) else node.id for node in inside if not _is_read(node)}
        self.own = {*code.co_varnames, *code.co_cellvars, *bound}  # also of what it has inside
        self.lengths: dict[str, bool] = {}  # a local name of a dim -> whether it is the last
        for target, value in _assigned(function):
            if (width := _dim(value)) is not None:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                for i, name in enumerate(names):
                    if isinstance(name, ast.Name):
                        self.lengths[name.id] = i == len(names) - 1 if len(names) > 1 else width

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if (parts := _parts(node)) is not None:
            return self.visit(ast.copy_location(parts, node))
        self.generic_visit(node)
        if len(node.ops) != 1 or type(node.ops[0]) not in OPERATORS:
            return node
        compare, operand, constant = type(node.ops[0]), node.left, node.comparators[0]
        if self._constancy(operand) == self._constancy(constant):
            return node
        if self._constancy(operand) > self._constancy(constant):
            compare, operand, constant = MIRRORED.get(compare, compare), constant, operand
        dims = [one for part in ast.walk(operand) if (one := self._width(part)) is not None]
        numbers = self.shrunk and any(_of_self(part) for part in ast.walk(operand))
        counts = not dims and any(self._counts(part) for part in ast.walk(operand))
        if not (dims or numbers or counts or isinstance(operand, ast.Name)) or (dims and all(dims) and not self.shrunk):
            return node
        place = (self.file, node.lineno, node.col_offset)
        line = f"{self.file}:{node.lineno}: {linecache.getline(self.file, node.lineno).strip()}"
        width = (bool(dims) and all(dims)) or (numbers and not dims and not counts)
        side = _Side(place, line, compare, bool(dims) or numbers or counts, width, counts, bool(dims))
        self.found.append(side)
        called = ast.Constant(f"{MARK}{len(self.found) - 1}")
        return ast.copy_location(ast.Call(called, [operand, constant], []), node)

    def visit_If(self, node: ast.If) -> ast.AST:
        node.test = _compared(node.test)
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        node.test = _compared(node.test)
        return self.generic_visit(node)

    def _constancy(self, node: ast.AST) -> int:
        """3: a number in the code, or a name that the function only reads; 2: a number of the module; 1: a number that the module
        changes; 0: a computed value."""
        if isinstance(node, ast.Constant):
            return 3 * (type(node.value) in (int, float))
        if isinstance(node, ast.Name):
            return 3 * (node.id not in self.own)
        return _of_self(node) * (1 if self._counts(node) else 2)

    def _counts(self, part: ast.AST) -> bool:
        return isinstance(part, ast.Attribute) and part.attr in self.counters and _of_self(part)

    def _width(self, part: ast.AST) -> bool | None:
        if isinstance(part, ast.Name):
            return self.lengths.get(part.id)
        return _dim(part) if isinstance(part, (ast.Subscript, ast.Call)) else None


def _compared(test: ast.expr) -> ast.expr:
    """Turn a condition that is a number (`length % 2`) into an explicit comparison."""
    if not (isinstance(test, ast.BinOp) and isinstance(test.op, ast.Mod | ast.FloorDiv)):
        return test
    zero = ast.copy_location(ast.Constant(0), test)
    return ast.copy_location(ast.Compare(test, [ast.NotEq()], [zero]), test)


def _parts(node: ast.Compare) -> ast.BoolOp | None:
    """`a < b < c` and `a in (1, 2)` as comparisons of two operands, if these call nothing except functions that read a tensor's sizes."""
    calls = (one for one in ast.walk(node) if isinstance(one, ast.Call))
    if any(_dim(one) is None for one in calls):
        return None
    operands = [node.left, *node.comparators]
    if len(node.ops) > 1:
        pairs = zip(operands, node.ops, operands[1:], strict=False)
        return ast.BoolOp(ast.And(), [ast.copy_location(ast.Compare(a, [op], [b]), b) for a, op, b in pairs])
    among = node.comparators[0]
    if isinstance(node.ops[0], ast.In) and isinstance(among, (ast.Tuple, ast.List, ast.Set)) and len(among.elts) > 1:
        each: list[ast.expr] = [ast.copy_location(ast.Compare(node.left, [ast.Eq()], [one]), one) for one in among.elts]
        return ast.BoolOp(ast.Or(), each)
    return None


def _assigned(function: ast.FunctionDef) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Each target with what it is set to; those of `a, b = c, d` one by one."""
    for node in (one for one in ast.walk(function) if isinstance(one, ast.Assign)):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=False)  # one may be starred
            else:
                yield target, node.value


def _is_read(node: ast.arg | ast.Name) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def _dim(node: ast.AST) -> bool | None:
    """Whether an expression is the last dim of a tensor; None where it is not a dim. `x.shape` is all dims."""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
        return ast.unparse(node.slice) == "-1"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "size":
        return bool(node.args) and ast.unparse(node.args[0]) == "-1"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("numel", "nelement"):
        return False
    if isinstance(node, ast.Call) and any(isinstance(one, ast.Attribute) and one.attr == "shape" for one in node.args):
        return False  # math.prod(x.shape)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len":
        return False
    return False if isinstance(node, ast.Attribute) and node.attr == "shape" else None


def _of_self(node: ast.AST) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
        if isinstance(node, ast.Name):
            return node.id == "self"
    return False
