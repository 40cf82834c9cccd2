"""The values that others in a run were computed from, and which of them are read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from shardplan.model.reduced.trace import Event, Trace


class Provenance:
    """Looks back along one run.

    Args:
        run: the run of a rank.
        owners: the module of each parameter, by full name.
    """

    def __init__(self, run: Trace, owners: Mapping[str, str]):
        self.run, self.owners = run, owners

    @cached_property
    def read(self) -> frozenset[int]:
        """The values that reach another boundary, and those that a differentiable result is computed from, directly
        or through other values (ids that are reshaped and looked up)."""
        read: set[int] = set()
        for event in reversed(self.run.events):
            if event.kind != "op" or any(self.run.requires_grad[i] or i in read for i in event.outputs):
                read.update(event.inputs)
        return frozenset(read)

    def modules(self, number: int) -> tuple[str, ...]:
        """The modules with parameters or a boundary that a value comes from, the nearest first; each path ends at the
        first multiplication, look-up or move."""
        found: dict[str, None] = {}
        for current, event in self.run.back([number], _begins):
            if current in self.run.parameters:
                found[self.owners[self.run.parameters[current]]] = None
            elif event is not None and _begins(current, event):
                found[event.module] = None
        return tuple(found)

    def parameters(self, number: int) -> tuple[int, ...]:
        """The parameters that a value is computed from; none if it also comes from anything else that is differentiable."""
        found: dict[int, None] = {}
        for current, event in self.run.back([number], lambda number, event: event.kind in ("enter", "leave")):
            if current in self.run.parameters:
                found[current] = None
            elif (
                event is None
                or event.kind in ("enter", "leave")
                or not any(self.run.requires_grad[i] for i in event.inputs)
            ):
                return ()
        return tuple(found)


def _begins(number: int, event: Event) -> bool:
    """Whether a path back ends at an event: a move, a multiplication or a look-up."""
    return event.kind in ("enter", "leave") or event.place[2] == "atom"
