"""Where the run-time can be changed by a rule, and the code with one such change."""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from . import of_code

N = TypeVar("N", bound=ast.AST)
ROOT = Path(__file__).parents[2]
MOVING = ("heads_of_weights", "local_parts", "gathering", "packing", "rms_norms")  # of torchlib
OTHER = "another_group"  # the function that the code of a mutant calls (other_groups.py)
OPERATORS = ("drop", "group", "dim", "argument", "swap", "factor")

_GROUPS = {"DeviceMesh", "ProcessGroup", "Group", "Route"}
_GROUP_NAMES = {"mesh", "group", "tp", "ep", "pp"}
_TENSORS = {"Tensor", "Sequence[Tensor]", "list[Tensor]"}
_READ = {"isinstance", "len", "getattr", "root_of", "get_group_rank", "get_world_size", "get_process_group_ranks"}
_OF_DIMS = {
    *("cat", "stack", "narrow", "split", "chunk", "unbind", "movedim", "unsqueeze", "flatten", "index_select", "index_copy"),
    *("sum", "mean", "amax", "cumsum", "argsort", "sort", "topk", "gather", "scatter", "softmax", "any", "diff"),
}  # fmt: skip
_OF_TORCH = {"keepdim", "descending", "rounding_mode", "dtype", "op", "group"}
_SWAPPED = {"forward": "backward", "backward": "forward", "sent": "received", "received": "sent", "R": "P", "I": "R"}
_SHAPES = (ast.Tuple, ast.List, ast.Subscript, ast.Slice, ast.Compare, ast.keyword)


@dataclass(frozen=True)
class Site:
    """A place of the run-time, and a change.

    Args:
        path: of the file, below the project's folder.
        number: of the change among those of the file.
        function: that it is in.
        lines: the first and the last one.
        before, after: the code.
        rules: that the change is made by, of RULES.
    """

    path: str
    number: int
    function: str
    operator: str
    lines: tuple[int, int]
    before: str
    after: str
    rules: str = "moves"

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").replace("/", ".")

    @property
    def area(self) -> str:
        """What it is a part of: mutants are drawn from all."""
        folder, name = self.path.split("/")[-2:]
        return f"{folder} experts" if "expert" in name else folder

    def tree(self) -> ast.Module:
        """The module with the change."""
        tree = _parsed(self.path)
        changes = list(RULES[self.rules][1](tree))
        _, old, new = changes[self.number]
        changed = _Put(old, new).visit(tree)
        return ast.fix_missing_locations(changed)


class _Put(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, ast.copy_location(new, old)

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


def sites(rules: str = "moves") -> list[Site]:
    """All, in the order of files and lines."""
    found = []
    files, changes = RULES[rules]
    for path in files():
        tree = _parsed(path)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        inside = {
            one: function.name for function in functions for one in ast.walk(function)
        }  # the inner ones come later
        for number, (operator, old, new) in enumerate(changes(tree)):
            lines = (old.lineno, old.end_lineno or old.lineno)  # type: ignore[attr-defined]
            function = inside.get(old, "")
            found.append(Site(path, number, function, operator, lines, ast.unparse(old), ast.unparse(new), rules))
    return sorted(found, key=lambda site: (site.path, site.lines, site.number))


def _files() -> list[str]:
    runtime = sorted((ROOT / "shardplan/runtime").rglob("*.py"))
    return [str(p.relative_to(ROOT)) for p in (*runtime, *(ROOT / f"shardplan/torchlib/{name}.py" for name in MOVING))]


def _files_of_code() -> list[str]:
    rooms = ("weights", "runtime", "cli")
    return [str(p.relative_to(ROOT)) for room in rooms for p in sorted((ROOT / "shardplan" / room).rglob("*.py"))]


def _parsed(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


@dataclass(frozen=True)
class _Defined:
    """What the signature of a function of the run-time says: which argument it moves, if it does (over a group, or in an autograd
    Function, or it is multiplied), and which have a default."""

    moved: int | None
    moves: bool
    defaults: frozenset[str]
    first_default: int


@cache
def _functions() -> dict[str, _Defined]:
    """Of each function; an autograd Function is its forward, without ctx."""
    found: dict[str, _Defined] = {}
    for path in _files():
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.FunctionDef) and not _is_method(node):
                found[node.name] = _defined(node.args, 0)
            if isinstance(node, ast.ClassDef) and "torch.autograd.Function" in map(ast.unparse, node.bases):
                (forward,) = (one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "forward")
                found[node.name] = _defined(forward.args, 1)
    return found


def _is_method(node: ast.FunctionDef) -> bool:
    return bool(node.args.args) and node.args.args[0].arg in ("self", "ctx", "cls")


def _defined(args: ast.arguments, first: int) -> _Defined:
    every = [*args.args[first:], *([args.vararg] if args.vararg else [])]
    words = [ast.unparse(one.annotation) if one.annotation else "" for one in every]
    defaults = {one.arg for one in args.args[len(args.args) - len(args.defaults) :]}
    defaults |= {one.arg for one, value in zip(args.kwonlyargs, args.kw_defaults, strict=True) if value is not None}
    moved = next((i for i, word in enumerate(words) if word in _TENSORS), None)
    over = any(set(word.replace("|", " ").split()) & _GROUPS for word in words)
    named = {one.arg for one in args.args}
    moves = over or first > 0 or "factor" in named
    return _Defined(moved, moves, frozenset(defaults), len(args.args) - first - len(args.defaults))


def _changes(tree: ast.Module) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """(operator, a node, what stands in its place), in the order of the tree. Annotations and defaults are left alone."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    inside = [
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.Lambda)
        for node in _body(function)
    ]
    for node in dict.fromkeys(inside):
        if isinstance(node, ast.Call):
            yield from (("drop", node, new) for new in _dropped(node))
            yield from (("group", old, new) for old, new in _of_other_groups(node))
            yield from (("dim", old, new) for old, new in _other_dims(node))
            yield from (("argument", node, new) for new in _without_argument(node))
            yield from (("swap", node, new) for new in _turned(node))
        elif isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div | ast.Mult):
            if isinstance(node, ast.BinOp):
                if not isinstance(parents[node], _SHAPES) and not isinstance(node.left, _SHAPES):
                    yield "factor", node, node.left
            else:
                yield "factor", node, ast.Pass()
        elif isinstance(node, ast.Attribute) and node.attr in _SWAPPED and isinstance(node.ctx, ast.Load):
            if "ward" not in node.attr or ast.unparse(node.value) == "ops":  # not the forward of a module
                yield "swap", node, ast.Attribute(node.value, _SWAPPED[node.attr], ast.Load())
        elif isinstance(node, ast.Attribute) and node.attr == "back" and isinstance(node.ctx, ast.Load):
            yield "swap", node, node.value


def _body(function: ast.FunctionDef | ast.Lambda) -> Iterator[ast.AST]:
    body = function.body if isinstance(function.body, list) else [function.body]
    for statement in body:
        yield from ast.walk(statement)


def _name(call: ast.Call) -> str:
    """Of what is called; of `Function.apply` the class."""
    function = call.func
    if isinstance(function, ast.Attribute):
        owner = function.value
        return owner.id if function.attr == "apply" and isinstance(owner, ast.Name) else function.attr
    if isinstance(function, ast.Subscript):
        return ast.unparse(function.value)
    return function.id if isinstance(function, ast.Name) else ""


def _of_dist(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "dist"


def _dropped(call: ast.Call) -> Iterator[ast.AST]:
    """What is moved, unmoved."""
    if _of_dist(call):
        if not _name(call).startswith(("get_", "is_", "new_")):
            yield ast.Constant(None)
        return
    name, moved = _name(call), None
    if name in ("OPERATIONS", "exchange", "_run"):
        moved = int(name != "OPERATIONS" and isinstance(call.func, ast.Name))
    elif (known := _functions().get(name)) is not None and known.moves:
        moved = known.moved
    elif name == "wait_tensor":
        moved = 0
    if moved is not None and moved < len(call.args):
        one = call.args[moved]
        if name == "exchange" and isinstance(call.func, ast.Name):
            yield ast.Tuple(call.args[moved:], ast.Load())
        else:
            yield one.value if isinstance(one, ast.Starred) else one


def _of_other_groups(call: ast.Call) -> Iterator[tuple[ast.AST, ast.AST]]:
    if _name(call) in _READ or _name(call) in vars(builtins):
        return
    for value in (*call.args, *(keyword.value for keyword in call.keywords)):
        if _last_name(value) in _GROUP_NAMES:
            yield value, ast.Call(ast.Name(OTHER, ast.Load()), [value], [])


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get_group":
        return "group"
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _other_dims(call: ast.Call) -> Iterator[tuple[ast.AST, ast.AST]]:
    name = _name(call)
    for keyword in call.keywords:
        if keyword.arg == "dim":
            yield keyword.value, _next(keyword.value)
    for value in call.args:
        if _last_name(value) == "dim" or (name in _OF_DIMS and _number(value) is not None):
            yield value, _next(value)


def _number(node: ast.AST) -> int | None:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
    return value if type(value) is int else None


def _next(node: ast.expr) -> ast.expr:
    number = _number(node)
    if number is None:
        return ast.BinOp(node, ast.Add(), ast.Constant(1))
    return ast.parse(str(number + 1 if number >= 0 else number - 1), mode="eval").body


def _without_argument(call: ast.Call) -> Iterator[ast.Call]:
    name = _name(call)
    known = _functions().get(name)
    for i, keyword in enumerate(call.keywords):
        if keyword.arg in (known.defaults if known else _OF_TORCH):
            yield ast.Call(call.func, call.args, call.keywords[:i] + call.keywords[i + 1 :])
    if known and known.defaults and len(call.args) > known.first_default and not call.keywords:
        yield ast.Call(call.func, call.args[:-1], [])


def _turned(call: ast.Call) -> Iterator[ast.Call]:
    """The move from the destination to the source."""
    if _name(call) == "move" and len(call.args) >= 4:
        first, mesh, source, destination, *rest = call.args
        yield ast.Call(call.func, [first, mesh, destination, source, *rest], call.keywords)


def by_stratum(found: list[Site]) -> dict[tuple[str, str], list[Site]]:
    """By area and operator."""
    strata: dict[tuple[str, str], list[Site]] = defaultdict(list)
    for site in found:
        strata[site.area, site.operator].append(site)
    return strata


# By name: which files are changed, and how. "moves" are those that `validate` must see, "code" those that tests must.
RULES = {"moves": (_files, _changes), "code": (_files_of_code, of_code.changes)}
