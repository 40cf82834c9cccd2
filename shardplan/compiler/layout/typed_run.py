"""The known facts about the values of a run while it is typed, and the findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

from shardplan.model.reduced.trace import Event, Trace

from .finding import Finding, Kind, Operand
from .types import FREE, Type


class Stopped(Exception):
    """Raised at a finding after which nothing matters."""


class TypedRun:
    """A run and the types of its values so far. What types values notes it here, and reads here what others noted.

    Args:
        provenance: where the values of the first rank's run come from.
        stop: whether nothing after a finding matters.

    Attributes:
        run: the first rank's.
        findings: the findings, in the order of the run.
        operations: the number of operations typed.
        types: the types of values.
        makers: the modules whose results values are, or in whose forwards they were made.
        doubtful: the values that have a finding, or are computed from one that has.
    """

    def __init__(self, provenance: Provenance, stop: Callable[[Finding], bool]):
        self.provenance, self.run = provenance, provenance.run
        self.findings: list[Finding] = []
        self.operations = 0
        self.types: dict[int, Type] = {}
        self.makers: dict[int, str] = {}
        self.doubtful: set[int] = set()
        self._stop = stop
        self._reported: set[tuple[Kind, str]] = set()

    @cached_property
    def used(self) -> frozenset[int]:
        """The values that contribute to what the model returns, keeps or reads as numbers, or that are written into
        another value; all values, if it returned nothing."""
        run = self.run
        last = run.events[-1] if run.events else None
        if last is None or (last.kind, last.module) != ("leave", "") or not last.outputs:
            return frozenset(range(len(run.values)))
        found = {*last.outputs, *run.kept}
        for event in reversed(run.events):
            if event.kind in ("enter", "leave"):  # each argument and each result by itself
                found.update(i for i, o in zip(event.inputs, event.outputs, strict=True) if o in found)
            elif event.writes or not found.isdisjoint(event.outputs):
                found.update(event.inputs)
        return frozenset(found)

    def type_of(self, number: int) -> Type:
        """The type of a value; one without a type has no gradient that could be partial."""
        return self.types.get(number, FREE)

    def sources(self, numbers: Iterable[int]) -> list[int]:
        """The differentiable values among these; one that was not compared is replaced by its sources."""
        result: dict[int, None] = {}
        for number in numbers:
            if self.run.requires_grad[number]:
                found = self.type_of(number)
                result.update(dict.fromkeys(sorted(found.sources) if found.kind == "?" else [number]))
        return list(result)

    def find(
        self,
        kind: Kind,
        event: Event,
        subject: str,
        numbers: Sequence[int],
        *,
        actual: str = "",
        wanted: str = "",
        message: str = "",
        once: bool = False,
    ) -> None:
        """Note a finding.

        Args:
            numbers: the values it is about.
            once: do not note a second finding of this kind about this subject.

        Raises:
            Stopped: nothing after it matters.
        """
        if once and (kind, subject) in self._reported:
            return
        self._reported.add((kind, subject))
        self.findings.append(
            Finding(
                kind,
                event.module,
                subject,
                event.name if event.kind in ("op", "crash") else "",
                event.source,
                tuple(self._operand(number) for number in dict.fromkeys(numbers)),
                actual,
                wanted,
                message,
                follows=not self.doubtful.isdisjoint(numbers),
                at=self.operations,
            )
        )
        if self._stop(self.findings[-1]):
            raise Stopped

    def _operand(self, number: int) -> Operand:
        value = self.run.values[number]
        return Operand(
            number,
            self.run.parameters.get(number),
            self.makers.get(number, ""),
            tuple(value.shape),
            self.type_of(number).describe(value.ndim),
            self.run.requires_grad[number],
            self.provenance.modules(number),
        )


# The values that others in a run were computed from, and which of them are read.
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
