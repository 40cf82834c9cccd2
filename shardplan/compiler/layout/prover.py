"""Walks over the events of a run, types all its values and finds where they do not fit.

`operations` types the results of operations, `crossings` the values at the boundary of a module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from torch import nn

from shardplan.core.layout import I, Layout
from shardplan.core.mesh import Axis
from shardplan.core.tree import full_name
from shardplan.model.reduced.trace import Event, Place
from shardplan.styles.bound import BoundModule

from .crossings import Crossings
from .drawing_operands import DrawingOperand, drawing_operands, own_values
from .dropout import is_noisy
from .finding import Finding
from .mergeable_sums import shared_sums
from .operation_types import Operations
from .provenance import Provenance
from .reads import shared_reads
from .spread import SUM, Spread
from .spreads import Spreads
from .typed_run import Stopped, TypedRun
from .types import Type, read_order
from .typing_result import Proof

# The type of a parameter that every rank reads whole, or as a part of a sum.
READ = {"I": Type("I"), "R": Type("R"), "P": Type("P", SUM)}


class Prover:
    """Types one run.

    Args:
        model: the unsharded model.
        plan: each module and its boundary.
        spreads: how values are spread, from the run of every rank.
        provenance: where the values of the first rank's run come from.
        gathers: the output layouts of modules whose gradient is unresolved; R by default.
        units: modules whose parameters are gathered only while they run themselves.
        parts: operation -> operand -> whether it contributes to the result, where that is typed.
        stop: whether nothing after a finding matters.
        drawing: modules whose own code draws random numbers.
        results: as for `Crossings`.
        decides: as for `Operations.asked`.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Mapping[str, BoundModule],
        spreads: Spreads,
        provenance: Provenance,
        gathers: Mapping[str, Layout],
        units: Sequence[str] = (),
        parts: Mapping[Place, Mapping[int, bool]] = MappingProxyType({}),
        stop: Callable[[Finding], bool] = lambda finding: False,
        drawing: Collection[str] = (),
        results: Sequence[Layout] = (I,),
        decides: Callable[[int], bool] = lambda place: False,
    ):
        self.decides = decides
        self.drawing = drawing
        self.plan, self.runs, self.run = plan, spreads.runs, provenance.run
        self.typed = TypedRun(provenance, stop)
        self.operations = Operations(self.typed, plan, spreads, units, parts)
        self.crossings = Crossings(self.typed, self.operations, model, plan, spreads, gathers, results)

    def prove(self) -> Proof:
        typed, crossings = self.typed, self.crossings
        try:
            self._parameters()
            self._walk()
            self.operations.asked(self.decides)
        except Stopped:
            return Proof(tuple(typed.findings), crossings.incoming, (), (), typed.operations, stopped=True)
        taken = (name for name, one in self.plan.items() if one.boundary.inputs or one.boundary.output is not None)
        return Proof(
            tuple(typed.findings),
            crossings.incoming,
            shared_reads(self.run, crossings.entering, taken),
            shared_sums(self.run, crossings.reduced),
            typed.operations,
            entering=tuple(crossings.entering),
            reduced=tuple(crossings.reduced),
            doubts=self.operations.doubts,
            operands=(*drawing_operands(self.run, typed), *self._own_values()),
        )

    def _own_values(self) -> tuple[DrawingOperand, ...]:
        """The own values of modules that have a probability, and of those that draw."""
        having = {name for name, one in self.plan.items() if is_noisy(one.module.kind, one.module.numbers)}
        having |= set(self.drawing)
        return tuple(dict.fromkeys(own_values(self.run, self.typed, self.operations.spreads, having))) if having else ()

    def _parameters(self) -> None:
        owned = {full_name(bound.name, p.name): (bound, p) for bound in self.plan.values() for p in bound.parameters}
        for number, name in self.run.parameters.items():
            bound, parameter = owned[name]
            self.typed.made(number, bound.name)
            dim = parameter.computed.dim
            if parameter.computed.axis is not Axis.TP:  # its module's input says which
                self.typed.set_type(number, READ["I"])
            elif isinstance(dim, int):
                info = bound.module.parameter(parameter.name)
                assert info is not None, name
                order = read_order(parameter, info.shape[dim], len(self.runs))
                self.typed.set_type(number, Type("V", Spread("split", dim, order)))
            else:
                self.typed.set_type(number, READ[parameter.computed.kind])

    def _walk(self) -> None:
        for event in self.run.events:
            match event.kind:
                case "op":
                    self.operations.op(event)
                case "read":
                    self.operations.read(event)
                case "enter":
                    self.crossings.enter(event)
                case "leave":
                    self.crossings.leave(event)
                case "crash":
                    self._crash(event, event.inputs)
        for run in self.runs[1:]:
            if run.crash is not None and self.run.crash is None:
                self._crash(run.crash, ())  # the numbers of its values belong to another rank

    def _crash(self, event: Event, numbers: tuple[int, ...]) -> None:
        self.typed.find("crash", event, event.module, numbers, message=event.message)
