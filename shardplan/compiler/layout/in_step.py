"""Finds the unsharded run's operation that matches a rank's, where the rank's code skips or adds some."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher
from functools import cached_property

from shardplan.core.search_bounds import BOUNDS
from shardplan.model.reduced.trace import Place, SourceLine, Trace

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
