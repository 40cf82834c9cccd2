"""Compares every rank's values with the unsharded model's, one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import cached_property
from typing import Literal

from torch import Tensor

from shardplan.core.search_bounds import BOUNDS
from shardplan.core.tree import ancestors, full_name
from shardplan.model.reduced.trace import Event, Place, SourceLine, Trace
from shardplan.styles.bound import BoundModule

from .spread import Order, Spread, scale, spread_of


class Spreads:
    """How the values of a run are spread; each is compared once.

    Args:
        plan: each module and its boundary.
        reference: the unsharded run.
        runs: the run of each rank.
        usual: the same runs with the masks and indices that the model chooses, where these are others (`other_choices`).
    """

    def __init__(
        self, plan: Mapping[str, BoundModule], reference: Trace, runs: Sequence[Trace], usual: Sequence[Trace] = ()
    ):
        self.plan, self.reference, self.runs, self.usual = plan, reference, runs, usual
        self._in_step = InStep(reference, runs[0])
        self._known: dict[tuple[int, bool], Spread | None] = {}
        self._orders: dict[Order, None] = {}

    def place(self, event: Event) -> Place | None:
        """The place in the unsharded run of the first rank's event; None where it has none."""
        return self._in_step.place(event.place)

    def of(self, event: Event, index: int, *, inputs: bool = False) -> Spread | Literal["?"] | None:
        """How a value in an event of the first rank is spread; None where the ranks' values do not make up the
        reference, "?" where the runs are out of step."""
        others: list[Event] = []
        count = len(event.inputs if inputs else event.outputs)
        place = self.place(event) if event.kind != "op" or event.place[:2] not in self._uneven else None
        for run in (self.reference, *self.runs):
            at = place if run is self.reference else event.place
            other = run.at.get(at) if at is not None else None
            if other is None or other.name != event.name or len(other.inputs if inputs else other.outputs) != count:
                return "?"
            others.append(other)
        numbers = [other.inputs if inputs else other.outputs for other in others]
        key = (numbers[1][index], inputs)
        if key not in self._known:
            whole = self._unsharded(event, numbers[0], index)
            locals_ = [run.values[n[index]] for run, n in zip(self.runs, numbers[1:], strict=True)]
            rounding = self.reference.rounding[numbers[0][index]]
            found = spread_of(locals_, whole, rounding=rounding, orders=self._orders)
            if found is None:
                noise = max((scale(self.reference.values[i]) for i in others[0].inputs), default=0.0)
                found = spread_of(locals_, whole, noise, rounding, self._orders)
            if found is not None and found.order is not None and found.copies == 1:
                self._orders[found.order] = None
            self._known[key] = found
        return self._known[key]

    def returned(self) -> bool:
        """Whether what moves, and the ranks' results of all modules, make up the unsharded ones; but for results of those that are called as
        often as the data say. After a move a value is the unsharded one's, whatever moved."""

        def told(event: Event) -> Iterable[int]:
            even = event.kind == "leave" and self.uneven.isdisjoint(ancestors(event.module))
            return range(len(event.inputs)) if even else event.moved

        events = self.runs[0].events
        return all(isinstance(self.of(event, i, inputs=True), Spread) for event in events for i in told(event))

    @cached_property
    def uneven(self) -> frozenset[str]:
        """The modules that run other operations on ranks than on each other, or than with the model's own choices."""
        return frozenset(module for module, _ in self._uneven)

    @cached_property
    def _uneven(self) -> frozenset[tuple[str, int]]:
        """The calls whose operations depend on the data: ranks run other ones than each other, or than with the model's own choices. There the
        same position is not the same value."""
        runs = [*map(_operations, self.runs)]
        pairs = [(runs[0], other) for other in runs[1:]]
        if self.usual:
            whole, *own = map(_operations, self.usual)
            pairs += [(_operations(self.reference), whole), *zip(runs, own, strict=True)]
        return frozenset(place[:2] for one, other in pairs for place, _ in one ^ other)

    @cached_property
    def _whole_parameters(self) -> Mapping[str, Tensor]:
        return {name: self.reference.values[number] for number, name in self.reference.parameters.items()}

    def _unsharded(self, event: Event, values: tuple[int, ...], index: int) -> Tensor:
        """The reference of a value; without the bias, if a module computed the value before it adds one."""
        whole = self.reference.values[values[index]]
        if event.place[2] in ("atom", "out") and index == 0:
            for parameter in self.plan[event.module].parameters:
                if parameter.withheld:
                    whole = whole - self._whole_parameters[full_name(event.module, parameter.name)]
        return whole


def _operations(run: Trace) -> frozenset[tuple[Place, str]]:
    return frozenset((event.place, event.name) for event in run.events)


# Finds the unsharded run's operation that matches a rank's, where the rank's code skips or adds some.
_Step = tuple[str, SourceLine | None]
_Steps = dict[tuple[str, int], dict[int, _Step]]
_Positions = Mapping[int, int | None]
_NONE: _Positions = {}


class InStep:
    """Finds the places of a rank's operations in the unsharded run.

    Code asks how many heads there are (`if num_key_heads != num_value_heads: key = key.repeat_interleave(...)`), so a
    rank with one of each runs fewer operations of a call. Later ones match the unsharded run's, at other positions.

    Args:
        reference: the unsharded run.
        run: the run of one rank; all ranks run the same operations.
    """

    def __init__(self, reference: Trace, run: Trace):
        self.reference, self.run = reference, run
        self._known: dict[tuple[str, int], _Positions] = {}

    def place(self, place: Place) -> Place | None:
        """The place in the unsharded run; None where it has no such operation."""
        module, call, position = place
        here, dot, reading = str(position).partition(".")
        if not here.isdecimal():
            return place
        own = self._positions((module, call)).get(int(here), int(here))
        return None if own is None else (module, call, f"{own}.{reading}" if dot else own)

    def _positions(self, scope: tuple[str, int]) -> _Positions:
        """Positions that differ."""
        if scope not in self._known:
            whole, own = (steps.get(scope, {}) for steps in self._steps)
            apart = [*own.items()] != [*whole.items()][: len(own)] and max(len(whole), len(own)) <= BOUNDS.aligned
            self._known[scope] = _aligned(whole, own) if apart else _NONE
        return self._known[scope]

    @cached_property
    def _steps(self) -> tuple[_Steps, _Steps]:
        return _steps(self.reference), _steps(self.run)


def _steps(run: Trace) -> _Steps:
    """For each call, the operations of its own code, in order, with their positions."""
    found: _Steps = {}
    for event in run.events:
        position = event.place[2]
        if event.kind == "op" and isinstance(position, int):
            found.setdefault(event.place[:2], {})[position] = (event.name, event.source)
    return found


def _aligned(whole: Mapping[int, _Step], own: Mapping[int, _Step]) -> _Positions:
    positions: dict[int, int | None] = dict.fromkeys(own)
    theirs, ours = list(whole), list(own)
    for block in SequenceMatcher(None, [*whole.values()], [*own.values()], autojunk=False).get_matching_blocks():
        for offset in range(block.size):
            positions[ours[block.b + offset]] = theirs[block.a + offset]
    positions[max(ours, default=-1) + 1] = max(theirs, default=-1) + 1  # reads after the last operation
    return positions
