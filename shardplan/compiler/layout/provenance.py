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
    def _producers(self) -> Mapping[int, Event]:
        producers: dict[int, Event] = {}
        for event in self.run.events:
            for number in event.outputs:
                if number not in event.inputs:
                    producers.setdefault(number, event)
        return producers

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
        seen, queue = {number}, [number]
        for current in queue:
            if current in self.run.parameters:
                found[self.owners[self.run.parameters[current]]] = None
                continue
            event = self._producers.get(current)
            if event is None:
                continue
            if event.kind in ("enter", "leave") or event.place[2] == "atom":
                found[event.module] = None
                continue
            for other in event.inputs:
                if other not in seen and self.run.requires_grad[other]:
                    seen.add(other)
                    queue.append(other)
        return tuple(found)

    def parameters(self, number: int) -> tuple[int, ...]:
        """The parameters that a value is computed from; none if it also comes from anything else that is differentiable."""
        found: dict[int, None] = {}
        seen, queue = {number}, [number]
        for current in queue:
            if current in self.run.parameters:
                found[current] = None
                continue
            event = self._producers.get(current)
            if event is None or event.kind not in ("op", "read"):
                return ()
            sources = [i for i in event.inputs if self.run.requires_grad[i]]
            if not sources:
                return ()
            for other in sources:
                if other not in seen:
                    seen.add(other)
                    queue.append(other)
        return tuple(found)
