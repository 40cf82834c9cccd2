"""Branches of the user's own code that a reduced model does not take. The code compares a length, a width, a layer's number or a count of
its calls with a constant, or cuts a length by one (`x[:, 512:]`, `range(n // 512)`), and reduced models are short, narrow, have few layers
and run few steps. With another constant the reduced model takes the other branch, which is proven too."""

from __future__ import annotations

import dis
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from shardplan.core.diagnostics import Code, Diagnostic, Severity
from shardplan.core.search_bounds import BOUNDS
from shardplan.model.reduced.reduced_model import ReducedModel
from shardplan.model.source_code import is_own

from .constants_in_code import Bound, Others, Place, Side, definition, functions_of, instrument

UNTAKEN = Code("SP423")


@dataclass(frozen=True)
class OtherSides:
    """The sides of comparisons that a reduced model does not take.

    Args:
        branches: changes of a reduced model, so that it takes other sides; each with the lines of these comparisons.
        untaken: the lines of comparisons with a side that cannot be taken.
    """

    branches: tuple[tuple[Callable[[ReducedModel], ReducedModel], tuple[str, ...]], ...] = ()
    untaken: tuple[str, ...] = ()

    def warning(self) -> tuple[Diagnostic, ...]:
        """SP423, if there are any such lines."""
        if not self.untaken:
            return ()
        return (
            Diagnostic(
                code=UNTAKEN,
                severity=Severity.WARNING,
                message=f"no proof takes both branches of {len(self.untaken)} line{'s' * (len(self.untaken) > 1)} of the model's code",
                notes=self.untaken,
                help="pass `inputs` or `reduced` with which the code takes the branch that the model takes in training",
            ),
        )


def only_with(lines: Iterable[str], found: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """The errors of a reduced model that takes the other sides of these lines."""
    notes = tuple(f"only with the other side of {line}" for line in lines)
    return tuple(replace(one, notes=(*one.notes, *notes)) for one in found if one.is_error)


def other_sides(model: ReducedModel, built: nn.Module) -> OtherSides:
    """Reduced models that take the branches that this one does not take, where they run.

    Args:
        built: the model that `model` builds; it is not changed.
    """
    ran: dict[CodeType, Mapping[str, Any]] = {}
    taken: dict[Place, set[bool]] = {}
    lines: dict[Place, str] = {}
    made: list[tuple[Callable[[ReducedModel], ReducedModel], tuple[str, ...]]] = []
    others: dict[Place, float] = {}
    failing: set[Place] = set()
    for _ in range(BOUNDS.branches):
        sides = _observed(model, others, ran) or []
        for side in sides:
            taken.setdefault(side.place, set()).update(result for _, result in side.seen)
            lines[side.place] = side.line
        open_ = [side for side in sides if len(taken[side.place]) == 1 and side.place not in others.keys() | failing]
        chosen = {side.place: other for side in open_ if (other := side.flipped()) is not None}
        # bounds first: comparisons may count the parts that one makes (`len(parts) == 1`)
        bounds = {one.place: chosen[one.place] for one in open_ if isinstance(one, Bound) and one.place in chosen}
        new = bounds or chosen
        if new and _observed(model, others | new, ran) is None:  # first together
            failing |= {place for place in new if _observed(model, {**others, place: new[place]}, ran) is None}
            new = {place: other for place, other in new.items() if place not in failing}
            if new and _observed(model, others | new, ran) is None:
                failing |= new.keys()
                new = {}
        if new:
            others |= new
            made.append((partial(_with, others=dict(others)), tuple(lines[place] for place in others)))
        elif not bounds:
            break
    return OtherSides(tuple(made), tuple(sorted({*(lines[place] for place in failing), *_unread(built, ran)})))


def _with(model: ReducedModel, others: Others) -> ReducedModel:
    return replace(model, maker=partial(_built, model, others))


def _built(model: ReducedModel, others: Others) -> nn.Module:
    built = model.build()
    instrument(built, others, shrunk=model.config is not None)
    return built


def _unread(built: nn.Module, ran: Mapping[CodeType, Mapping[str, Any]]) -> tuple[str, ...]:
    """The functions that compare a length but cannot be replaced: without source, with decorators, or no methods of a module.

    Args:
        ran: the code that ran in the model's forwards, with its globals.
    """
    methods = {function.__code__: function for module in built.modules() for _, function in functions_of(module)}
    looked_at = {_place(one) for code in methods for one in _code_in(code)}
    queue = {code: names for code, names in ran.items() if _place(code) not in looked_at and is_own(code.co_filename)}
    wrapped = (one for module in built.modules() for _, one in functions_of(module, unwrapped=True))
    queue |= {one.__code__: one.__globals__ for one in wrapped}
    pending = list(queue.items())
    for code, names in pending:
        for one in map(names.get, code.co_names):
            if isinstance(one, FunctionType) and is_own(one.__code__.co_filename) and one.__code__ not in queue:
                queue[one.__code__] = one.__globals__
                pending.append((one.__code__, one.__globals__))
    return tuple(
        f"{code.co_filename}:{code.co_firstlineno}: {code.co_name}"
        for code in queue
        if (code not in methods or (node := definition(methods[code])) is None or node.decorator_list)
        and {"shape", "size"}.intersection(code.co_names)
        and any(one.opname in ("COMPARE_OP", "CONTAINS_OP") for one in dis.get_instructions(code))
    )


def _code_in(code: CodeType) -> Iterator[CodeType]:
    """Code, and that of the functions inside of it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _code_in(one)


def _place(code: CodeType) -> tuple[str, int, str]:
    return code.co_filename, code.co_firstlineno, code.co_name


@contextmanager
def _noted(ran: dict[CodeType, Mapping[str, Any]]) -> Iterator[None]:
    """Notes the Python code that runs."""

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            ran.setdefault(frame.f_code, frame.f_globals)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


def _observed(model: ReducedModel, others: Others, ran: dict[CodeType, Mapping[str, Any]]) -> list[Side] | None:
    """The comparisons that the model's forwards make, on each kind of input; None where one raises.

    Args:
        ran: gets the code that runs.
    """
    built = model.build()
    sides = instrument(built, others, shrunk=model.config is not None)
    lengths: set[int] = set()
    for side in sides:
        if isinstance(side, Bound):
            side.lengths = lengths
    for kind in model.kinds:
        inputs = model.inputs(kind=kind)
        for value in inputs.values():
            if isinstance(value, Tensor):
                dims = value.shape[:-1] if value.is_floating_point() else value.shape
                lengths |= {math.prod(dims[i:j]) for i in range(len(dims)) for j in range(i + 1, len(dims) + 1)}
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), _noted(ran):
                built(**inputs)
        except Exception:  # from the model's code, in a branch not made for these inputs
            return None
    merged: dict[Place, Side] = {}
    for side in sides:
        merged.setdefault(side.place, side).seen.extend(side.seen if side is not merged[side.place] else ())
    return [one for one in merged.values() if one.seen and (one.varies or all(v in lengths for v, _ in one.seen))]
