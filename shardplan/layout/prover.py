"""The types of all values of a run, and where they do not fit.

How a value is spread over the ranks (whole, split, a sum) is told by comparing what each rank has with what the
unsharded model has at the same place. Whether the gradient of a whole value is complete (I) or a partial sum (R)
follows from how it is read, as the chain rule has it, operation by operation:

| result | a whole operand's gradient on this rank |
|---|---|
| split | is this rank's slice's share: a partial sum |
| sum | is this rank's summand's share: a partial sum |
| whole | is complete where the result's is, and a partial sum where the result's is |

So a result that is split or a sum wants R of its whole operands, and a whole result wants all of one type, which it
has too. Nothing depends on which operation it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import nn

from shardplan.core.layout import I, Layout, P, R
from shardplan.core.tree import ancestors, block, full_name
from shardplan.torchlib.packing import packed_order
from shardplan.twin.recorder import argument_names
from shardplan.twin.trace import Event, Place

from .boundaries import Boundary, is_mean
from .elsewhere import below
from .finding import Finding, Kind, Operand
from .origins import Origins
from .reads import SharedRead, shared_reads
from .spread import SUM, WHOLE, Spread
from .spreads import Spreads
from .sums import SeenSum, SharedSum, shared_sums
from .types import FREE, LAYOUTS, Type, declared, same_order

# The type of a whole parameter, by how its gradient arrives.
HELD = {"complete": Type("I"), "partial": Type("R"), "divided": Type("P", SUM)}


@dataclass(frozen=True)
class Proof:
    """What was found.

    Args:
        findings: in the order of the run.
        arrivals: what arrives at each module that takes I or R; at one that gathers its output, what it hands on.
        reads: values that several modules move I -> R, each on its own.
        sums: partial sums that are added to each other once each is reduced on its own.
        operations: how many operations were typed.
        doubts: operation -> the operands that would have to have no part in it for its result to be what it seems, of which
            that is not known.
        stopped: at the last of the findings; what comes behind it was not looked at.
        entering: (value, module) for each I that a module moves to R.
        reduced: (value, module) for each partial sum that a module reduces as it hands it on.
        shared_reads: module that moves I -> R -> the one that moved the same tensor before, in every call of their block;
            None for one that did not always find it moved.
        declared: what was seen of each of the plan's `sum_outputs`.
    """

    findings: tuple[Finding, ...]
    arrivals: Mapping[str, Layout]
    reads: tuple[SharedRead, ...]
    sums: tuple[SharedSum, ...]
    operations: int
    entering: tuple[tuple[int, str], ...] = ()
    reduced: tuple[tuple[int, str], ...] = ()
    shared_reads: Mapping[str, str | None] = field(default_factory=dict)
    declared: tuple[SeenSum, ...] = ()
    doubts: Mapping[Place, tuple[int, ...]] = field(default_factory=dict)
    stopped: bool = False


class _Stopped(Exception):
    """A finding is the last that matters."""


class Prover:
    """Types one run.

    Args:
        model: the unsharded model.
        plan: the boundary of each module.
        spreads: of the run of every rank.
        origins: of the first rank's run.
        gathers: what modules with an open gradient hand on; R where not said.
        units: modules whose parameters are gathered only while they run themselves.
        parts: operation -> operand -> whether it has a part in the result, where that was found out.
        stop: whether nothing behind a finding matters.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Mapping[str, Boundary],
        spreads: Spreads,
        origins: Origins,
        gathers: Mapping[str, Layout],
        units: Sequence[str] = (),
        parts: Mapping[Place, Mapping[int, bool]] = MappingProxyType({}),
        stop: Callable[[Finding], bool] = lambda finding: False,
    ):
        self.model, self.plan, self.spreads, self.origins, self.gathers = model, plan, spreads, origins, gathers
        self.units, self.parts, self.stop = units, parts, stop
        self.doubts: dict[Place, tuple[int, ...]] = {}
        self.runs, self.run = spreads.runs, origins.run
        self.types: dict[int, Type] = {}
        self.maker: dict[int, str] = {}
        self.doubtful: set[int] = set()
        self.reported: set[tuple[Kind, str]] = set()
        self.findings: list[Finding] = []
        self.arrivals: dict[str, Layout] = {}
        self.operations = 0
        self.running: list[str] = []  # the modules whose forwards run, outermost first
        self.entering: list[tuple[int, str]] = []  # (value, module): an I that a module moves to R
        self.reduced: list[tuple[int, str]] = []  # (value, module): what a module hands on of a partial sum

    def prove(self) -> Proof:
        try:
            self._type()
        except _Stopped:
            return Proof(tuple(self.findings), self.arrivals, (), (), self.operations, stopped=True)
        taken = (name for name, boundary in self.plan.items() if boundary.moves)
        reads = shared_reads(self.run, self.entering, taken)
        sums = shared_sums(self.run, self.reduced)
        return Proof(
            tuple(self.findings),
            self.arrivals,
            reads,
            sums,
            self.operations,
            entering=tuple(self.entering),
            reduced=tuple(self.reduced),
            doubts=self.doubts,
        )

    def _type(self) -> None:
        self._parameters()
        for event in self.run.events:
            if event.kind == "enter":
                self.running.append(event.module)
            getattr(self, f"_{event.kind}")(event)
            if event.kind == "leave":
                self.running.pop()
        for run in self.runs[1:]:
            if run.crash is not None and self.run.crash is None:
                self._crash(run.crash, other_rank=True)

    def _parameters(self) -> None:
        held = {full_name(b.name, p.name): p for b in self.plan.values() for p in b.parameters}
        owners = {full_name(b.name, p.name): b.name for b in self.plan.values() for p in b.parameters}
        for number, name in self.run.parameters.items():
            parameter = held[name]
            if parameter.dim is not None:
                order = self._packed(parameter.parts) if parameter.parts else None
                self.types[number] = Type("V", Spread("split", parameter.dim, order))
            else:
                self.types[number] = HELD[parameter.gradient]
            self.maker[number] = owners[name]

    def _packed(self, parts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        order = packed_order(parts, len(self.runs)).view(len(self.runs), -1)
        return tuple(tuple(indices) for indices in order.tolist())

    def type_of(self, number: int) -> Type:
        return self.types.get(number, FREE)

    def _sources(self, numbers: Iterable[int]) -> list[int]:
        """The differentiable values among these; in place of one that was not compared, what it was made from."""
        result: dict[int, None] = {}
        for number in numbers:
            if self.run.requires_grad[number]:
                found = self.type_of(number)
                result.update(dict.fromkeys(sorted(found.sources) if found.kind == "?" else [number]))
        return list(result)

    # Events.

    def _op(self, event: Event) -> None:
        self.operations += 1
        for number in event.inputs:
            if number in self.run.parameters and not self._readable(number, event.module):
                self._find("outside", event, self.run.parameters[number], (number,), once=True)
        sources = self._sources(event.inputs)
        unfilled = event.writes or event.kind == "read" or any(self.type_of(i).kind == "?" for i in event.inputs)
        for index, output in enumerate(event.outputs):
            if output in event.inputs or output in self.types:
                continue
            self.maker[output] = event.module
            if any(i in self.doubtful for i in event.inputs):
                self.doubtful.add(output)
            spread = self.spreads.of(event, index)
            if not self.run.requires_grad[output]:
                self.types[output] = (
                    Type(LAYOUTS.get(spread.kind, "whole"), spread) if isinstance(spread, Spread) else FREE
                )
            elif spread == "?" or (spread is None and unfilled):
                self.types[output] = Type("?", sources=frozenset(sources))
            elif spread is None:
                self._mismatch(event, sources, output)
            elif spread.kind == "whole" and self._is_mean(event, sources):
                self.types[output] = Type("R")
            else:
                self.types[output] = self._combine(event, sources, spread, output)

    def _is_mean(self, event: Event, sources: list[int]) -> bool:
        """Whether it is over split features, and summed over the ranks (P -> R)."""
        return is_mean(self.plan, event.module, event.name) and all(self.type_of(n).kind == "V" for n in sources)

    def _readable(self, number: int, reader: str) -> bool:
        """Whether a parameter is a local tensor while a module's code runs: in its owner's, in that of the block which
        sums its partial gradient, and in that of the module around it which reads it, if it is not in a unit of its
        own."""
        owner = self.maker[number]
        running = (reader, *ancestors(reader)) if reader else ("",)
        if owner in running:
            return True
        if self.type_of(number).kind == "R" and block(owner) in running:
            return True
        apart = any(below(unit, reader) and (owner == unit or below(owner, unit)) for unit in self.units)
        return below(owner, reader) and not apart

    def _read(self, event: Event) -> None:
        if not event.inputs and self.run.requires_grad[event.outputs[0]]:
            spread = self.spreads.of(event, 0)
            self._find("untyped", event, event.module, event.outputs)
            self.types[event.outputs[0]] = Type("I", spread if isinstance(spread, Spread) else WHOLE)
            return
        self._op(event)

    def _combine(self, event: Event, sources: list[int], spread: Spread, output: int) -> Type:
        kinds = {number: self.type_of(number).kind for number in sources}
        tails = [n for n, kind in kinds.items() if kind == "tail"]
        if tails:
            return self._untangle(event, sources, tails[0], spread, output)
        if spread.empty and not self.run.values[output].numel():
            return Type("whole", spread)
        acting = self._acting(event, spread)
        if acting and (not spread.empty or spread.kind != "whole"):
            return self._hidden(event, acting, output)
        if spread.kind != "whole":
            for number, kind in kinds.items():
                if kind == "I":
                    self._found_partial(event, number)
            return Type(LAYOUTS[spread.kind], spread)
        if spread.empty and (acting or (acting is None and "P" in kinds.values())):
            return Type("P", SUM)
        if spread.empty and acting is None and "V" in kinds.values():
            return FREE
        complete = [n for n, kind in kinds.items() if kind == "I"]
        partial = [n for n, kind in kinds.items() if kind == "R"]
        if complete and partial:
            return self._meeting(event, complete, partial, output)
        return Type("I") if complete else Type("R") if partial else FREE

    def _acting(self, event: Event, spread: Spread) -> list[int] | None:
        """The partial sums and slices that have a part in a result that seems whole, and the partial sums that have one in
        a result that seems split: nothing but a tolerance, or a gate that is shut, hides them. None where it is not known."""
        if event.kind != "op":
            return None
        hiding = {"whole": ("P", "V"), "split": ("P",), "sum": ()}[spread.kind]
        found = {
            position: number
            for position, number in enumerate(event.inputs)
            if (kind := self.type_of(number).kind) in hiding
            and (self.run.requires_grad[number] or kind == "P")
            and self.run.values[number].is_floating_point()
        }
        known = self.parts.get(event.place, {})
        unknown = tuple(position for position in found if position not in known)
        if unknown:
            self.doubts[event.place] = tuple(found)
            return None
        return [number for position, number in found.items() if known[position]]

    def _hidden(self, event: Event, acting: list[int], output: int) -> Type:
        partial = any(self.type_of(number).kind == "P" for number in acting)
        self._find("sum" if partial else "slices", event, event.module, event.inputs)
        self.doubtful.add(output)
        return Type("P", SUM) if partial else FREE

    def _meeting(self, event: Event, complete: list[int], partial: list[int], output: int) -> Type:
        """A whole result of operands of both types: if one side is parameters only, these are wrong."""
        if all(n in self.run.parameters for n in complete):
            for number in complete:
                self._found_partial(event, number)
            return Type("R")
        if all(n in self.run.parameters for n in partial):
            for number in partial:
                self._find("complete", event, self.run.parameters[number], event.inputs, once=True)
            return Type("I")
        self._find("meeting", event, event.module, event.inputs)
        self.doubtful.add(output)
        return Type("R")

    def _found_partial(self, event: Event, number: int) -> None:
        others = tuple(i for i in event.inputs if i != number)
        parameters = self.origins.parameters(number)
        for parameter in parameters:
            self._find("partial", event, self.run.parameters[parameter], (parameter, *others), once=True)
        if not parameters:
            self._find("partial", event, self.maker.get(number, event.module), (number, *others), once=True)

    def _untangle(self, event: Event, sources: list[int], tangled: int, spread: Spread, output: int) -> Type:
        """Which features of a value with an R tail an operation takes."""
        whole, tail = self.run.values[tangled], self.type_of(tangled).tail
        value = self.run.values[output]
        head, rest = whole[..., :-tail], whole[..., -tail:]
        if value.shape == rest.shape and torch.equal(value, rest):
            return Type("R")
        if value.shape == head.shape and torch.equal(value, head):
            return Type("I")
        if value.shape[-1:] == whole.shape[-1:] and spread.kind == "whole":
            return Type("tail", tail=tail)
        self._find("untyped", event, event.module, event.inputs)
        return Type("I")

    def _mismatch(self, event: Event, sources: list[int], output: int) -> None:
        kinds = {self.type_of(number).kind for number in sources}
        split = [n for n in sources if self.type_of(n).kind == "V"]
        if not event.module and split:  # the model's last step with its logits, before callers get them
            arrived = self.type_of(split[0]).describe(self.run.values[split[0]].ndim)
            self._find("output", event, "logits", split[:1], arrived=arrived, wanted="I")
            self.doubtful.add(output)
            self.types[output] = FREE
            return
        self._find("sum" if "P" in kinds else "slices", event, event.module, event.inputs)
        self.doubtful.add(output)
        self.types[output] = Type("P", SUM) if "P" in kinds else FREE

    def _enter(self, event: Event) -> None:
        boundary = self.plan[event.module]
        if not boundary.takes:
            return
        module = self.model.get_submodule(event.module)
        for position, name in enumerate(event.names):
            if boundary.argument == "*":
                chosen = self.run.values[event.inputs[position]].is_floating_point()
            else:
                chosen = name == (boundary.argument or argument_names(module)[0])
            if chosen:
                self._arrive(event, boundary, position)

    def _arrive(self, event: Event, boundary: Boundary, position: int) -> None:
        number, inside = event.inputs[position], event.outputs[position]
        if inside != number and inside not in self.origins.read:
            return
        ndim = self.run.values[number].ndim
        arrived = self._resolved(event, number, position)
        if not any(self._fits(arrived, layout, ndim, boundary) for layout in boundary.takes):
            wanted = " or ".join(str(layout) for layout in boundary.takes)
            self._find("arrival", event, boundary.name, (number,), arrived=arrived.describe(ndim), wanted=wanted)
        if arrived.kind == "I" and boundary.inside == R:
            self.entering.append((number, boundary.name))
        if I in boundary.takes and R in boundary.takes and arrived.kind in ("I", "R"):
            before = self.arrivals.setdefault(boundary.name, I if arrived.kind == "I" else R)
            if before.kind != arrived.kind:
                self._find(
                    "arrival", event, boundary.name, (number,), arrived=arrived.kind, wanted=f"{before}, as before"
                )
        self.maker.setdefault(inside, boundary.name)
        if inside != number or inside not in self.types:
            self.types[inside] = declared(boundary.inside, self.run.values[inside].ndim)

    def _resolved(self, event: Event, number: int, position: int) -> Type:
        """The type of what stands at a boundary; what was not compared before is compared there."""
        found = self.type_of(number)
        if found.kind != "?":
            return found
        spread = self.spreads.of(event, position, inputs=True)
        if not isinstance(spread, Spread):
            self._find("untyped", event, event.module, (number,))
            self.doubtful.add(number)
            return found
        resolved = self._combine(event, self._sources([number]), spread, number)
        self.types[number] = resolved
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
        if found.spread.dim != layout.dim % ndim:
            return False
        expected = self._read_order(boundary) if boundary is not None and layout.dim == -1 else None
        return same_order(found.spread.order, expected, len(self.runs))

    def _read_order(self, boundary: Boundary) -> tuple[tuple[int, ...], ...] | None:
        """The order in which the split input features of a module's weight lie on the ranks."""
        parts = next((p.parts for p in boundary.parameters if p.name.rpartition(".")[2] == "weight"), ())
        return self._packed(parts) if parts else None

    def _leave(self, event: Event) -> None:
        boundary = self.plan[event.module]
        for position, number in enumerate(event.inputs):
            if self.run.requires_grad[number]:
                self._resolved(event, number, position)
        if boundary.hands is not None and event.inputs:
            self._hand_on(event, boundary)
        if boundary.tail and event.outputs:
            self.types[event.outputs[0]] = Type("tail", tail=boundary.tail)
        for position in boundary.outside:
            if position < len(event.inputs):
                self._hand_outside(event, boundary, position)
        if not event.module:
            self._hand_over(event)

    def _hand_on(self, event: Event, boundary: Boundary) -> None:
        number, handed = event.inputs[0], event.outputs[0]
        computed, ndim = self.type_of(number), self.run.values[number].ndim
        if not self._fits(computed, boundary.computes, ndim, None):
            wanted = str(boundary.computes)
            self._find("result", event, boundary.name, (number,), arrived=computed.describe(ndim), wanted=wanted)
        hands = boundary.hands
        if boundary.open_gradient:
            hands = self.arrivals[boundary.name] = self.gathers.get(boundary.name, R)
        if boundary.scope is not None and boundary.scope not in self.running:
            hands = I
        if boundary.computes == P and hands.kind in "IV" and not boundary.vocabulary:
            self.reduced.append((handed, boundary.name))
        if handed != number:
            self.types[handed] = declared(hands, self.run.values[handed].ndim)
            self.maker[handed] = boundary.name

    def _hand_outside(self, event: Event, boundary: Boundary, position: int) -> None:
        found = self.type_of(event.inputs[position])
        if found.kind not in ("R", "whole"):
            ndim = self.run.values[event.inputs[position]].ndim
            arrived = found.describe(ndim)
            self._find(
                "result", event, boundary.name, event.inputs[position : position + 1], arrived=arrived, wanted="R"
            )
        self.types[event.outputs[position]] = Type("I")
        self.maker[event.outputs[position]] = boundary.name

    def _hand_over(self, event: Event) -> None:
        """The model's results: callers get each on every rank whole, with a complete gradient."""
        for name, number in zip(event.names, event.outputs, strict=True):
            found = self.type_of(number)
            if self.run.requires_grad[number] and found.kind not in ("I", "whole", "?"):
                ndim = self.run.values[number].ndim
                self._find("output", event, name, (number,), arrived=found.describe(ndim), wanted="I")

    def _crash(self, event: Event, other_rank: bool = False) -> None:
        self._find("crash", event, event.module, event.inputs if not other_rank else (), message=event.message)

    # Findings.

    def _find(
        self,
        kind: Kind,
        event: Event,
        subject: str,
        numbers: Sequence[int],
        *,
        arrived: str = "",
        wanted: str = "",
        message: str = "",
        once: bool = False,
    ) -> None:
        if once and (kind, subject) in self.reported:
            return
        self.reported.add((kind, subject))
        self.findings.append(
            Finding(
                kind,
                event.module,
                subject,
                event.name if event.kind in ("op", "crash") else "",
                event.source,
                tuple(self._operand(number) for number in dict.fromkeys(numbers)),
                arrived,
                wanted,
                message,
                follows=any(number in self.doubtful for number in numbers),
                at=self.operations,
            )
        )
        if self.stop(self.findings[-1]):
            raise _Stopped

    def _operand(self, number: int) -> Operand:
        value = self.run.values[number]
        return Operand(
            number,
            self.run.parameters.get(number),
            self.maker.get(number, ""),
            tuple(value.shape),
            self.type_of(number).describe(value.ndim),
            self.run.requires_grad[number],
            self.origins.modules(number),
        )
