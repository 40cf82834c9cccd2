"""One forward run, operation by operation, as data.

Every torch call with a tensor in its result is an event at a place: (module path, number of the module's call, position
in this call). A sharded and an unsharded run of a model are compared place by place. A module that is a single look-up
or matrix multiplication is one event.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from torch import Tensor

from shardplan.core.by_key import by_key

Place = tuple[str, int, int | str]  # module, call number, position or boundary ("in.hidden_states", "out.0")


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the model's own code."""

    file: str
    line: int

    @property
    def text(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    @property
    def short(self) -> str:
        """`modeling_llama.py:63`."""
        return f"{Path(self.file).name}:{self.line}"

    @property
    def shown(self) -> str:
        """The place and its text, as notes have it."""
        return f"{self.short}: `{self.text}`"


@dataclass(slots=True)
class Event:
    """An event of the run.

    Args:
        kind: "op" (a torch call, or a whole look-up or matrix multiplication), "read" (a tensor seen for the first time
            or changed in place since it was last seen), "enter" and "leave" (a module's arguments and results),
            "crash" (an exception).
        name: the torch function's name, or the module's class.
        place: its place, unique in a run.
        inputs, outputs: values, by number. At "enter" and "leave", the outputs are the inputs after the moves at the module's
            boundary; they have the same numbers where nothing was moved.
        names: the names of the inputs at "enter" (arguments) and "leave" (`loss`, `0`).
        source: the line of the model's code.
        message: the exception's message.
        writes: it changed an operand in place; other elements of this operand may not be filled yet.
    """

    kind: Literal["op", "read", "enter", "leave", "crash"]
    name: str
    place: Place
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    source: SourceLine | None = None
    message: str = ""
    writes: bool = False

    @property
    def module(self) -> str:
        return self.place[0]

    @property
    def moved(self) -> tuple[int, ...]:
        """At "enter" and "leave", the positions of the values that were moved; each move is a collective, forward or backward."""
        if self.kind not in ("enter", "leave"):
            return ()
        pairs = zip(self.inputs, self.outputs, strict=True)
        return tuple(i for i, (before, after) in enumerate(pairs) if before != after)


@dataclass
class Trace:
    """A recorded run.

    Args:
        events: in order.
        values: the values, by number; they are copies, so that later in-place operations do not change them.
        requires_grad: for each value, whether it requires a gradient; in the body of an autograd.Function, which runs without
            gradients, whether one of its operands does.
        rounding: for each value, the rounding of the half-precision operations that it comes from, relative to the
            value (2^-8 in bfloat16); else 0.
        parts: operation -> operand -> whether the operand contributes to the result, for requested operations.
        parameters: value -> full name, for values that are parameters; `later`: the same for parameters that the forward has changed.
        at: place -> event.
        kept: values that code read as numbers, or kept after the run (in an attribute); results are not among them.
        compared: value of booleans or integers -> the whole numbers that code compares it with.
        answers: the values whose content code asked for (`item()`, `float()`, `if`, `tolist()`), in order; -1 for others.
        returned: module -> the length of the tuple or list that its last call returned; 0: one tensor, None: something else.
        written: the parameters that the run changed, by full name.
        drew: whether the model's code drew random numbers, from any generator.
    """

    events: list[Event] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    requires_grad: list[bool] = field(default_factory=list)
    rounding: list[float] = field(default_factory=list)
    parts: dict[Place, dict[int, bool]] = field(default_factory=dict)
    parameters: dict[int, str] = field(default_factory=dict)
    later: dict[int, str] = field(default_factory=dict)
    at: dict[Place, Event] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    compared: dict[int, set[int]] = field(default_factory=dict)
    answers: list[int] = field(default_factory=list)
    returned: dict[str, int | None] = field(default_factory=dict)
    written: frozenset[str] = frozenset()
    drew: bool = False

    def argument(self, module: str, call: int, name: str) -> Tensor | None:
        """The value of a module's argument."""
        event = self.at.get((module, call, "in"))
        if event is None or name not in event.names:
            return None
        return self.values[event.inputs[event.names.index(name)]]

    def result(self, module: str, call: int, position: int = 0) -> Tensor | None:
        """The tensor at a position of a module's result."""
        event = self.at.get((module, call, "out"))
        return self.values[event.inputs[position]] if event is not None and position < len(event.inputs) else None

    @cached_property
    def readers(self) -> Mapping[int, Sequence[Event]]:
        """The events that read each value, in order."""
        return by_key((number, event) for event in self.events for number in dict.fromkeys(event.inputs))

    @cached_property
    def producers(self) -> Mapping[int, Event]:
        """The event that made each value: an operation, or a move at the boundary of a module."""
        found: dict[int, Event] = {}
        for event in self.events:
            for number in event.outputs:
                if number not in event.inputs:
                    found.setdefault(number, event)
        return found

    def back(self, numbers: Iterable[int], ends: Callable[[int, Event], bool]) -> Iterator[tuple[int, Event | None]]:
        """Values and the differentiable ones that they come from, the nearest first, each once with the event that made it (None for a
        parameter). A path ends at a parameter, and at an event where `ends` says so."""
        queue = list(dict.fromkeys(numbers))
        seen = set(queue)
        for number in queue:
            event = None if number in self.parameters else self.producers.get(number)
            yield number, event
            if event is not None and not ends(number, event):
                more = [n for n in dict.fromkeys(event.inputs) if self.requires_grad[n] and n not in seen]
                queue += more
                seen.update(more)

    def with_running(self) -> Iterator[tuple[Event, list[str]]]:
        """Each event, with the modules whose forwards run there, outermost first; a module runs at its "enter", and no longer at its
        "leave"."""
        running: list[str] = []
        for event in self.events:
            if event.kind == "leave":
                running.pop()
            elif event.kind == "enter":
                running.append(event.module)
            yield event, running

    def as_trained(self) -> Trace:
        """The run as if all parameters were trained, and nothing were detached: values computed from them require a gradient. The same
        trace where all of them do."""
        needs = list(self.requires_grad)
        for number in self.parameters:
            needs[number] = True
        for event in self.events:
            if any(needs[number] for number in event.inputs):
                for number in event.outputs:
                    needs[number] |= self.values[number].is_floating_point()
        return self if needs == self.requires_grad else replace(self, requires_grad=needs)

    @property
    def finite(self) -> bool:
        """Whether all values that the model returned are finite."""
        return all(bool(value.isfinite().all()) for value in self.results if value.is_floating_point())

    @property
    def results(self) -> list[Tensor]:
        """The tensors that the model returned."""
        return [self.values[number] for event in self.events[-1:] for number in event.inputs]

    @cached_property
    def empty(self) -> frozenset[str]:
        """The modules in whose code an operation reads or returns a tensor without elements."""
        nothing = {number for number, value in enumerate(self.values) if not value.numel()}
        return frozenset(e.module for e in self.events if nothing and not nothing.isdisjoint((*e.inputs, *e.outputs)))

    @property
    def crash(self) -> Event | None:
        return self.events[-1] if self.events and self.events[-1].kind == "crash" else None
