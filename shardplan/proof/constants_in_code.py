"""The constants of a module's own code that lengths, widths, numbers of layers and counts are compared with or cut by: functions that record
what they are compared with, and that run with others."""

from __future__ import annotations

import ast
import inspect
import linecache
import operator
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from shardplan.model.source_code import is_own, parsed

OPERATORS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: operator.contains,
    ast.NotIn: lambda those, one: one not in those,
}
MIRRORED: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt,
    ast.Gt: ast.Lt,
    ast.LtE: ast.GtE,
    ast.GtE: ast.LtE,
}
MARK = "shardplan compares "
JOINED = frozenset(("sum", "count_nonzero", "max", "min"))  # one number of a tensor, by int() or float()
AMONG = (ast.In, ast.NotIn)
Constants = ast.Constant | ast.Attribute | ast.Name

Place = tuple[str, int, int]  # file, line, column
Others = Mapping[Place, float]  # a constant -> the number that replaces it


@dataclass(eq=False)  # it is a constant of code, which must be hashable
class Side:
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

    def __call__(self, operand: Any, constant: Any, /) -> Any:
        is_buffer = self.counts and isinstance(operand, Tensor) and operand.ndim == 0
        number = operand.item() if is_buffer else operand
        if self.compare in AMONG and isinstance(operand, (list, set)):
            number = max((one for one in operand if type(one) is int), default=0)
        known = (int, float) if self.counts or self.real else (int,)
        if type(number) not in known or type(constant) not in known:
            return OPERATORS[self.compare](operand, constant)
        constant = constant if self.other is None else self.other
        result = OPERATORS[self.compare](number if is_buffer else operand, constant)
        self.seen.append((number, result))
        return torch.tensor(result) if is_buffer else result

    def flipped(self) -> float | None:
        """A constant that makes it take the other branch; None where it took both, or neither."""
        if len({result for _, result in self.seen}) != 1:
            return None
        values, result = [value for value, _ in self.seen], self.seen[0][1]
        above, below = max(values) + 1, -1 if self.width else max(values) - 1
        match self.compare(), result:
            case (ast.Eq() | ast.In(), False) | (ast.NotEq() | ast.NotIn(), True):
                return values[-1]
            case (ast.Gt(), False) | (ast.GtE(), False):
                return below if self.width or self.compare is ast.Gt else below + 1
            case (ast.Lt(), True) | (ast.LtE(), True):
                return (0 if self.width else min(values)) - (self.compare is ast.LtE)
            case _:
                return above


@dataclass(eq=False)
class Bound(Side):
    """A constant that a function cuts or divides lengths by, which counts where it is longer than them. A call with it replaces each of its uses
    in the function, and a call with it and a length, or a tensor and its dim, each length that it cuts.

    Args:
        lengths: of the inputs; a tensor's dim of another length does not count.
    """

    lengths: set[int] = field(default_factory=set)

    def __call__(self, cut: Any, constant: Any, dim: Any = 0, /) -> Any:
        number = constant if self.other is None or type(constant) is not int else self.other
        if cut is None:
            return number
        length = cut
        if isinstance(cut, Tensor):
            sizes = cut.shape[dim:][:1] if type(dim) is int else ()
            length = next((size for size in sizes if size in self.lengths), None)
        if type(length) is type(constant) is int and length != constant:
            self.seen.append((length, length > number))
        return cut

    def flipped(self) -> float | None:
        """Half of the longest, where the constant cut nothing."""
        longest = max((length for length, _ in self.seen), default=0)
        return None if longest < 2 or any(result for _, result in self.seen) else longest // 2


def functions_of(module: nn.Module, *, unwrapped: bool = False) -> Iterator[tuple[str, FunctionType]]:
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


def instrument(model: nn.Module, others: Others, *, shrunk: bool) -> list[Side]:
    """Replace the user's own functions of all modules by functions that record comparisons."""
    sides: list[Side] = []
    for module in model.modules():
        functions = list(functions_of(module))
        counters = frozenset(name for _, function in functions for name in _written(function.__code__))
        for name, function in functions:
            found: list[Side] = []
            changed = _changed(function, found, counters, shrunk=shrunk)
            if changed is not None and found:
                for side in found:
                    side.other = others.get(side.place)
                sides += found
                # a function set on the instance knows its module, or is a method of it
                own = vars(module).get(name)
                vars(module)[name] = changed if isinstance(own, FunctionType) else MethodType(changed, module)
    return sides


def definition(function: FunctionType) -> ast.FunctionDef | None:
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
    function: FunctionType, found: list[Side], counters: frozenset[str], *, shrunk: bool
) -> FunctionType | None:
    """The same function with a call of a `Side` instead of each comparison with a constant.

    Args:
        counters: attributes that the module's functions change.
    """
    node, code = definition(function), function.__code__
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


def _with_sides(code: CodeType, found: list[Side]) -> CodeType:
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
        self, function: ast.FunctionDef, code: CodeType, found: list[Side], counters: frozenset[str], *, shrunk: bool
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
        self.bounds: dict[str, Bound] = {}
        # what is cut -> the bounds, each with the dim if a tensor is cut
        self.cuts: dict[ast.AST, list[tuple[ast.expr, ...]]] = defaultdict(list)
        for part in ast.walk(function):
            for cut, bound, *dim in self._cuts(part):
                self.bounds[ast.unparse(bound)] = Bound(*self._place(bound), ast.Gt, varies=True, width=False)
                self.cuts[cut].append((bound, *dim))

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if (parts := _parts(node)) is not None:
            return self.visit(ast.copy_location(parts, node))
        operands = [one if self._constancy(one) else self.visit(one) for one in (node.left, *node.comparators)]
        node.left, node.comparators = operands[0], operands[1:]
        if len(node.ops) != 1 or type(node.ops[0]) not in OPERATORS:
            return node
        compare, operand, constant = type(node.ops[0]), node.left, node.comparators[0]
        if self._constancy(operand) == self._constancy(constant) or (compare in AMONG and self._constancy(constant)):
            return node  # nor `n in SIZES`
        if self._constancy(operand) > self._constancy(constant):
            compare, operand, constant = MIRRORED.get(compare, compare), constant, operand
        if self._width(operand) is not None and _asks_for_any(compare, constant):
            return node
        dims = [one for part in ast.walk(operand) if (one := self._width(part)) is not None]
        numbers = self.shrunk and any(_of_self(part) for part in ast.walk(operand))
        counts = not dims and any(self._counts(part) for part in ast.walk(operand))
        if not (dims or numbers or counts or isinstance(operand, ast.Name)) or (dims and all(dims) and not self.shrunk):
            return node
        width = (bool(dims) and all(dims)) or (numbers and not dims and not counts)
        side = Side(*self._place(node), compare, bool(dims) or numbers or counts, width, counts, bool(dims))
        return self._called(side, node, [operand, constant])

    def visit(self, node: ast.AST) -> Any:
        """What is in the place of a node."""
        is_bound = bool(self.bounds) and isinstance(node, Constants) and self._constancy(node) > 1
        bound = self.bounds.get(ast.unparse(node)) if is_bound else None
        new = super().visit(node) if bound is None else self._called(bound, node, [ast.Constant(None), node])
        for constant, *dim in self.cuts.get(node, ()):
            new = self._called(self.bounds[ast.unparse(constant)], new, [new, constant, *dim])
        return new

    def visit_Match(self, node: ast.Match) -> ast.AST:
        return node  # a pattern calls nothing

    def _called(self, side: Side, node: ast.AST, arguments: list[Any]) -> ast.AST:
        if side not in self.found:
            self.found.append(side)
        called = ast.Constant(f"{MARK}{self.found.index(side)}")
        return ast.copy_location(ast.Call(called, arguments, []), node)

    def _place(self, node: ast.expr) -> tuple[Place, str]:
        line = f"{self.file}:{node.lineno}: {linecache.getline(self.file, node.lineno).strip()}"
        return (self.file, node.lineno, node.col_offset), line

    def _cuts(self, node: ast.AST) -> Iterator[tuple[Any, ...]]:
        """What a node cuts or divides by constants that may be longer: the length with the constant, or a tensor with the constant and the
        dim."""
        lengths: list[tuple[ast.expr, ast.expr]] = []
        match node:
            case ast.BinOp(length, ast.FloorDiv() | ast.Mod() | ast.Div(), bound) | ast.Call(
                ast.Name("range"), [_, length, bound]
            ):
                lengths = [(length, bound)]
            case ast.Call(ast.Name("min" | "max"), [one, other]):
                lengths = [(one, other), (other, one)]
            case ast.Call(ast.Attribute(ast.Name("torch"), "split"), [tensor, bound, *dim]) | ast.Call(
                ast.Attribute(tensor, "split"), [bound, *dim]
            ) if self._is_bound(bound):
                named = [one.value for one in node.keywords if one.arg == "dim"] if isinstance(node, ast.Call) else []
                yield tensor, bound, [*dim, *named, ast.Constant(0)][0]
            case ast.Subscript(tensor, index):
                indices = index.elts if isinstance(index, ast.Tuple) else [index]
                for i, one in enumerate(indices):
                    counted = any(isinstance(each, ast.Constant) and each.value is ... for each in indices[:i])
                    for end in (one.lower, one.upper) if isinstance(one, ast.Slice) else ():
                        last = end.operand if isinstance(end, ast.UnaryOp) and isinstance(end.op, ast.USub) else end
                        if self._is_bound(last):
                            yield tensor, last, ast.Constant(i - len(indices) * counted)
        for length, bound in lengths:
            if self._is_bound(bound):
                yield from ((part, bound) for part in ast.walk(length) if self._width(part) is False)

    def _is_bound(self, node: ast.expr | None) -> bool:
        """Whether a node is a constant that may be longer than a length."""
        one = node.value if isinstance(node, ast.Constant) else 2
        return isinstance(node, Constants) and self._constancy(node) > 1 and type(one) is int and one > 1

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


def _asks_for_any(compare: type[ast.cmpop], constant: ast.expr) -> bool:
    """Whether a length is compared with nothing (`len(rows) == 0`, `len(rows) < 1`): this asks whether there are any, in a model of each size."""
    number = constant.value if isinstance(constant, ast.Constant) else None
    return (number == 0 and compare in (ast.Eq, ast.NotEq, ast.Gt, ast.LtE)) or (
        number == 1 and compare in (ast.Lt, ast.GtE)
    )


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
    for node in ast.walk(function):
        if isinstance(node, (ast.For, ast.comprehension)):
            yield node.target, node.iter
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(target.elts, node.value.elts, strict=False)  # one may be starred
                else:
                    yield target, node.value


def _is_read(node: ast.arg | ast.Name) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def _dim(node: ast.AST) -> bool | None:
    """Whether an expression is the last dim of a tensor; None where it is neither a dim nor numbers read off a tensor. `x.shape` is all dims."""
    match node:
        case ast.Subscript(ast.Attribute(attr="shape"), index) | ast.Call(ast.Attribute(attr="size"), [index]):
            return ast.unparse(index) == "-1"
        case ast.Attribute(attr="shape") | ast.Call(
            ast.Attribute(attr="size" | "numel" | "nelement" | "item" | "tolist")
        ):
            return False
        case ast.Call(ast.Name("len")) | ast.Call(args=[ast.Attribute(attr="shape"), *_]):  # math.prod(x.shape)
            return False
        case ast.Call(ast.Name("list" | "set"), [one]):
            return _dim(one)
        case ast.Call(ast.Name("int" | "float"), [one]):
            inside = [part.attr for part in ast.walk(one) if isinstance(part, ast.Attribute)]
            return None if JOINED.isdisjoint(inside) else False
    return None


def _of_self(node: ast.AST) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
        if isinstance(node, ast.Name):
            return node.id == "self"
    return False
