"""What a pipeline stage reads, from one recorded unsharded run.

Every stage runs the model's own forward, with stubs in place of the modules of other stages. So a value is right in a
stage if it comes only from the model's inputs, buffers, parameters of that stage and values that the stage received.
Between these, the model's code outside of the blocks may compute anything. Every other value is what a stub returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from shardplan.core.search_bounds import BOUNDS
from shardplan.core.tree import ModuleTree, ancestors, full_name
from shardplan.model.reduced.trace import Event, Trace


@dataclass(frozen=True, slots=True)
class StageParts:
    """The blocks in order; modules and parameters of the first and the last stage; modules whose output is carried."""

    blocks: tuple[str, ...]
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that a stage reads but does not have.

    Args:
        cut: the number of blocks before the stage.
        value: its number in the trace.
        roots: the values of other stages that it comes from.
        read: where it is read; for a result of the model, where the model returns it.
        result: the name of that result, else "".
    """

    cut: int
    value: int
    roots: tuple[int, ...]
    read: Event
    result: str = ""


@dataclass
class Reads:
    """What one stage reads.

    Args:
        missing: the values that it does not have, each once.
        used: (module, position) of a carried value -> whether it is read.
        connected: whether the first own block reads the received value.
    """

    missing: dict[int, Crossing] = field(default_factory=dict)
    used: set[tuple[str, str]] = field(default_factory=set)
    connected: bool = False


class StageRun:
    """A recorded run, divided by its blocks.

    Args:
        trace: the run of the unsharded model.
        tree: the model's.
        parts: what is in which stage.
    """

    def __init__(self, trace: Trace, tree: ModuleTree, parts: StageParts):
        self.trace, self.tree, self.parts = trace, tree, parts
        self._index = {name: i for i, name in enumerate(parts.blocks)}
        self._tied = {name: group for group in tree.tied for name in group}
        self._regions: dict[str, str | None] = {}

    @cached_property
    def active(self) -> tuple[int | None, ...]:
        """For each event, the block that is running."""
        found, running = [], None
        for event in self.trace.events:
            if event.kind == "enter" and event.module in self._index and running is None:
                running = self._index[event.module]
            found.append(running)
            if event.kind == "leave" and running is not None and event.module == self.parts.blocks[running]:
                running = None
        return tuple(found)

    def calls(self) -> tuple[int, ...]:
        """The blocks in the order in which they were called."""
        entered = (event.module for event in self.trace.events if event.kind == "enter")
        return tuple(self._index[module] for module in entered if module in self._index)

    def read_by(self, event: Event) -> Iterator[str]:
        """The parameters that an operation reads, by the names under which its module has them."""
        return (name for number in event.inputs for name in self.names_of(number, event.module)[:1])

    def names_of(self, number: int, module: str) -> tuple[str, ...]:
        """The names by which a module's code may read a parameter: those inside it, else all; none for other values."""
        name = self.trace.parameters.get(number, self.trace.later.get(number))
        if name is None:
            return ()
        group = self._tied.get(name, (name,))
        return tuple(one for one in group if one.startswith(full_name(module, ""))) or group

    def region(self, module: str) -> str | None:
        """The module of the first or last stage that is this module or is around it."""
        if module not in self._regions:
            ends = (*self.parts.first, *self.parts.last)
            self._regions[module] = next((one for one in ends if f"{module}.".startswith(f"{one}.")), None)
        return self._regions[module]

    def reads_of(self, cut: int, *, last: bool) -> Reads:
        """What a stage reads that begins with a given block.

        Args:
            cut: the number of that block; 0 for the first stage.
            last: whether it is the last stage, which returns the model's results.
        """
        trace, parts = self.trace, self.parts
        first = frozenset(parts.first) if cut else frozenset[str]()
        absent_ends = first | (frozenset() if last else frozenset(parts.last))
        absent = tuple(full_name(name, "") for name in (*absent_ends, *parts.blocks[:cut]))
        carried = set(parts.carried)
        wrong: dict[int, tuple[int, ...]] = {}
        handed: dict[int, tuple[str, str]] = {}
        derived: set[int] = set()
        found = Reads()
        for event, active in zip(trace.events, self.active, strict=True):
            own = active is not None and active >= cut
            if event.kind == "enter":
                if event.module == parts.blocks[cut] and (not cut or derived & set(event.inputs)):
                    found.connected = True
                continue
            if event.kind == "leave":
                if cut and event.module == parts.blocks[cut - 1] and event.inputs:
                    wrong.pop(event.inputs[0], None)
                    derived.add(event.inputs[0])
                if event.module in carried and not own and (active is not None or self.region(event.module) in first):
                    for name, number in zip(event.names, event.inputs, strict=True):
                        wrong.pop(number, None)
                        handed[number] = (event.module, name)
                if not event.module and last:
                    self._results(event, cut, wrong, found)
                continue
            if (active is not None and not own) or self.region(event.module) in absent_ends:
                for number in event.outputs:
                    if number not in event.inputs:
                        wrong[number] = (number,)
                continue
            found.used.update(handed[number] for number in event.inputs if number in handed)
            bad = {number: wrong[number] for number in event.inputs if number in wrong}
            for number in event.inputs:
                names = self.names_of(number, event.module)
                if names and all(full_name(name, "").startswith(absent) for name in names):
                    bad[number] = (number,)
            if bad and own:
                for number, roots in bad.items():
                    found.missing.setdefault(number, Crossing(cut, number, roots, event))
                bad = {}
            if any(number in derived for number in event.inputs):
                derived.update(event.outputs)
            for number in event.outputs:
                if bad:
                    roots = (*(root for some in bad.values() for root in some),)
                    wrong[number] = tuple(dict.fromkeys(roots))[: BOUNDS.roots]
                elif number not in event.inputs:
                    wrong.pop(number, None)
        return found

    def _results(self, event: Event, cut: int, wrong: Mapping[int, tuple[int, ...]], found: Reads) -> None:
        for name, number in zip(event.names, event.inputs, strict=True):
            if number in wrong and self.trace.values[number].is_floating_point():
                found.missing.setdefault(number, Crossing(cut, number, wrong[number], event, name))

    def written(self) -> frozenset[str]:
        """Modules of the first stage whose result is changed in place."""
        results = {
            number: event.module
            for event in self.trace.events
            if event.kind == "leave" and event.module in self.parts.first
            for number in event.inputs
        }
        writing = (event for event in self.trace.events if event.kind == "op" and event.writes)
        return frozenset(results[number] for event in writing for number in event.inputs if number in results)

    def carried_results(self) -> Iterator[tuple[str, str]]:
        """Carried modules, with the positions of their results that have gradients."""
        left = (e for e in self.trace.events if e.kind == "leave" and e.module in self.parts.carried)
        named = ((e.module, name, number) for e in left for name, number in zip(e.names, e.inputs, strict=True))
        return ((module, name) for module, name, number in named if self.trace.values[number].is_floating_point())

    @cached_property
    def returning(self) -> Mapping[int, str]:
        """Value -> the module that returns it. For a further result of a block this is the block, else it is the innermost module."""
        found: dict[int, str] = {}
        for event in self.trace.events:
            if event.kind == "leave" and event.module in self._index:
                found.update(dict.fromkeys(event.inputs[1:], event.module))
            elif event.kind == "leave" and event.module:
                for number in event.inputs:
                    found.setdefault(number, event.module)
        return found


@dataclass(frozen=True, slots=True)
class Ends:
    """Where the parameters outside of the blocks are read.

    Args:
        first, last: modules, or parameters of modules around the blocks, in the tree's order.
        inside: parameters that are read while a block runs, or between two blocks.
        both: parameters that are read before the blocks and after them.
        unread: parameters that nothing reads.
    """

    first: tuple[str, ...]
    last: tuple[str, ...]
    inside: tuple[str, ...] = ()
    both: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


def find_ends(runs: Iterable[StageRun]) -> Ends:
    """Find which parameters are read before the first block, and which after the last one, in recorded runs of one
    model. Those in the blocks, or in what the plan names, are left out."""
    runs = tuple(runs)
    tree, parts = runs[0].tree, runs[0].parts
    named = (*parts.blocks, *parts.first, *parts.last)
    outside = [name for name in tree.parameters if not any(f"{name}.".startswith(f"{one}.") for one in named)]
    before, inside, after = set[str](), set[str](), set[str]()
    for run in runs:
        last = max((i for i, active in enumerate(run.active) if active is not None), default=-1)
        began = False
        for i, (event, active) in enumerate(zip(run.trace.events, run.active, strict=True)):
            began = began or active is not None
            if event.kind not in ("op", "read"):
                continue
            names = set(run.read_by(event))
            (before if not began else after if i > last else inside).update(names)
    roots = {name: stage_root(tree, name, parts.blocks) for name in outside}
    for group in tree.tied:  # an alias that no module reads goes where the others are
        for phase in (before, inside, after):
            if not phase.isdisjoint(group):
                phase.update(one for one in group if one in roots and not {one} & (before | inside | after))
    for name in outside:  # adapters' copy of a module that is trained whole goes where that module is
        there = None if name in before | inside | after else _nearby(name, parts.blocks, (before, inside, after))
        if there is not None:
            there.add(name)
    read = before | inside | after

    def of(names: Iterable[str]) -> tuple[str, ...]:
        chosen = set(names)
        return outermost(dict.fromkeys(roots[name] for name in outside if name in chosen))

    ambiguous = inside | (before & after)
    return Ends(
        first=of(before - ambiguous),
        last=of(after - ambiguous),
        inside=tuple(name for name in outside if name in inside),
        both=tuple(name for name in outside if name in before & after and name not in inside),
        unread=tuple(name for name in outside if name not in read),
    )


def outermost(names: Mapping[str, None]) -> tuple[str, ...]:
    """Those that are inside none of the others."""
    return tuple(one for one in names if not any(one.startswith(full_name(other, "")) for other in names))


def _nearby(name: str, blocks: tuple[str, ...], phases: tuple[set[str], ...]) -> set[str] | None:
    """For a parameter that nothing reads, the phase in which its neighbours are read. These are the other parameters in its
    module, or in a module around it without blocks. None if no neighbour is read, or if several phases read them."""
    for around in ancestors(name):
        prefix = full_name(around, "")
        if not around or any(one.startswith(prefix) for one in blocks):
            return None
        found = [phase for phase in phases if any(one.startswith(prefix) for one in phase)]
        if found:
            return found[0] if len(found) == 1 else None
    return None


def stage_root(tree: ModuleTree, name: str, blocks: tuple[str, ...]) -> str:
    """The module that owns a parameter, if no other module with parameters is below it or if it is one operation; else the parameter itself."""
    owner = tree.owner(name)
    if owner and tree.modules[owner].kind in ("embedding", "linear", "conv1d"):
        return owner
    prefix = full_name(owner, "")
    below = any(other.startswith(prefix) and tree.owner(other) != owner for other in tree.parameters)
    return name if not owner or below or any(one.startswith(prefix) for one in blocks) else owner
