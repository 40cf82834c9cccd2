"""What arrives at a module and what it hands on, held against its boundary in the plan."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from shardplan.core.layout import I, Layout, P, R
from shardplan.twin.recorder import argument_names
from shardplan.twin.trace import Event

from .boundaries import Boundary
from .known import Known
from .operations import Operations
from .spread import Spread
from .spreads import Spreads
from .types import Type, declared, packed_indices, same_order


class Crossings:
    """Types what crosses the boundaries of modules.

    Args:
        known: of the values so far; types of what was moved and findings are added.
        operations: types what was not compared before it arrives at a boundary.
        model: the unsharded model.
        plan: the boundary of each module.
        spreads: of the run of every rank.
        gathers: what modules with an open gradient hand on; R where not said.

    Attributes:
        arrivals, entering, reduced: as in `Proof`.
        running: the modules whose forwards run, outermost first.
    """

    def __init__(
        self,
        known: Known,
        operations: Operations,
        model: nn.Module,
        plan: Mapping[str, Boundary],
        spreads: Spreads,
        gathers: Mapping[str, Layout],
    ):
        self.known, self.operations, self.model = known, operations, model
        self.plan, self.spreads, self.gathers = plan, spreads, gathers
        self.arrivals: dict[str, Layout] = {}
        self.running: list[str] = []
        self.entering: list[tuple[int, str]] = []
        self.reduced: list[tuple[int, str]] = []

    def enter(self, event: Event) -> None:
        """A module is called: what arrives has to be what its boundary takes."""
        self.running.append(event.module)
        boundary = self.plan[event.module]
        if not boundary.takes:
            return
        module = self.model.get_submodule(event.module)
        for position, name in enumerate(event.names):
            if boundary.argument == "*":
                chosen = self.known.run.values[event.inputs[position]].is_floating_point()
            else:
                chosen = name == (boundary.argument or argument_names(module)[0])
            if chosen:
                self._arrive(event, boundary, position)

    def _arrive(self, event: Event, boundary: Boundary, position: int) -> None:
        number, inside = event.inputs[position], event.outputs[position]
        if inside != number and inside not in self.known.origins.read:
            return
        ndim = self.known.run.values[number].ndim
        arrived = self._resolved(event, number, position)
        if not any(self._fits(arrived, layout, ndim, boundary) for layout in boundary.takes):
            wanted = " or ".join(str(layout) for layout in boundary.takes)
            self.known.find("arrival", event, boundary.name, (number,), arrived=arrived.describe(ndim), wanted=wanted)
        if arrived.kind == "I" and boundary.inside == R:
            self.entering.append((number, boundary.name))
        if I in boundary.takes and R in boundary.takes and arrived.kind in ("I", "R"):
            before = self.arrivals.setdefault(boundary.name, I if arrived.kind == "I" else R)
            if before.kind != arrived.kind:
                self.known.find(
                    "arrival", event, boundary.name, (number,), arrived=arrived.kind, wanted=f"{before}, as before"
                )
        self.known.maker.setdefault(inside, boundary.name)
        if inside != number or inside not in self.known.types:
            assert boundary.inside is not None, boundary  # as it takes a layout
            self.known.types[inside] = declared(boundary.inside, self.known.run.values[inside].ndim)

    def _resolved(self, event: Event, number: int, position: int) -> Type:
        """The type of what stands at a boundary; what was not compared before is compared there."""
        found = self.known.type_of(number)
        if found.kind != "?":
            return found
        spread = self.spreads.of(event, position, inputs=True)
        if not isinstance(spread, Spread):
            self.known.find("untyped", event, event.module, (number,))
            self.known.doubtful.add(number)
            return found
        resolved = self.operations.combine(event, self.known.sources([number]), spread, number)
        self.known.types[number] = resolved
        return resolved

    def _fits(self, found: Type, layout: Layout, ndim: int, boundary: Boundary | None) -> bool:
        if found.spread.empty or found.kind == "?":
            return True
        if found.kind == "whole":
            return layout.kind in "IR" and found.spread.kind == "whole"
        if found.kind != layout.kind:
            return False
        if found.kind != "V":
            return True
        if found.spread.dim != layout.split_dim(ndim):
            return False
        expected = self._read_order(boundary) if boundary is not None and layout.dim == -1 else None
        return same_order(found.spread.order, expected, len(self.spreads.runs))

    def _read_order(self, boundary: Boundary) -> tuple[tuple[int, ...], ...] | None:
        """The order in which the split input features of a module's weight lie on the ranks."""
        parts = next((p.parts for p in boundary.parameters if p.name.rpartition(".")[2] == "weight"), ())
        return packed_indices(parts, len(self.spreads.runs)) if parts else None

    def leave(self, event: Event) -> None:
        """A module returns: its results get the types that its boundary hands on."""
        boundary = self.plan[event.module]
        for position, number in enumerate(event.inputs):
            if self.known.run.requires_grad[number]:
                self._resolved(event, number, position)
        if boundary.hands is not None and event.inputs:
            self._hand_on(event, boundary)
        if boundary.tail and event.outputs:
            self.known.types[event.outputs[0]] = Type("tail", tail=boundary.tail)
        for position in boundary.outside:
            if position < len(event.inputs):
                self._hand_outside(event, boundary, position)
        if not event.module:
            self._hand_over(event)
        self.running.pop()

    def _hand_on(self, event: Event, boundary: Boundary) -> None:
        number, handed, hands = event.inputs[0], event.outputs[0], boundary.hands
        assert hands is not None and boundary.computes is not None, boundary
        computed, ndim = self.known.type_of(number), self.known.run.values[number].ndim
        if not self._fits(computed, boundary.computes, ndim, None):
            wanted = str(boundary.computes)
            self.known.find("result", event, boundary.name, (number,), arrived=computed.describe(ndim), wanted=wanted)
        if boundary.open_gradient:
            hands = self.arrivals[boundary.name] = self.gathers.get(boundary.name, R)
        if boundary.scope is not None and boundary.scope not in self.running:
            hands = I
        if boundary.computes == P and hands.kind in "IV" and not boundary.vocabulary:
            self.reduced.append((handed, boundary.name))
        if handed != number:
            self.known.types[handed] = declared(hands, self.known.run.values[handed].ndim)
            self.known.maker[handed] = boundary.name

    def _hand_outside(self, event: Event, boundary: Boundary, position: int) -> None:
        found = self.known.type_of(event.inputs[position])
        if found.kind not in ("R", "whole"):
            ndim = self.known.run.values[event.inputs[position]].ndim
            arrived = found.describe(ndim)
            self.known.find(
                "result", event, boundary.name, event.inputs[position : position + 1], arrived=arrived, wanted="R"
            )
        self.known.types[event.outputs[position]] = Type("I")
        self.known.maker[event.outputs[position]] = boundary.name

    def _hand_over(self, event: Event) -> None:
        """The model's results: callers get each on every rank whole, with a complete gradient."""
        for name, number in zip(event.names, event.outputs, strict=True):
            found = self.known.type_of(number)
            if self.known.run.requires_grad[number] and found.kind not in ("I", "whole", "?"):
                ndim = self.known.run.values[number].ndim
                self.known.find("output", event, name, (number,), arrived=found.describe(ndim), wanted="I")
