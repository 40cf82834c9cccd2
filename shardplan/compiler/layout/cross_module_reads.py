"""What the model's code reads of other modules: parameters of those below (`self.conv.weight`, not `self.conv(x)`), and results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

from shardplan.core.by_key import by_key
from shardplan.core.tree import ModuleTree, full_name, parent
from shardplan.model.reduced.trace import Trace


def find_cross_module_reads(run: Trace, tied: Iterable[tuple[str, ...]]) -> Mapping[str, tuple[str, ...]]:
    """Each module that ran -> the parameters of modules below it that its own code reads, by full name.

    Args:
        tied: as `ModuleTree` has it. A run knows a tied parameter by one of its names, and the code may read it by any other.
    """
    names_of = {name: group for group in tied for name in group}
    found: dict[str, dict[str, None]] = {event.module: {} for event in run.events}
    for event in (event for event in run.events if event.kind == "op"):
        for number in event.inputs:
            if (known := run.parameters.get(number)) is not None:
                names = (n for n in names_of.get(known, (known,)) if below(parent(n), event.module))
                found[event.module].update(dict.fromkeys(names))
    return {module: tuple(names) for module, names in found.items()}


def below(name: str, other: str) -> bool:
    """Whether a module is inside another one."""
    return name != other and name.startswith(full_name(other, ""))


def joined_reads(runs: Iterable[Mapping[str, Iterable[str]]]) -> dict[str, tuple[str, ...]]:
    """The reads of several runs of a model together."""
    found = by_key(one for run in runs for one in run.items())
    return {module: tuple(dict.fromkeys(chain.from_iterable(names))) for module, names in found.items()}


def cross_module_reads_of(tree: ModuleTree, reads: Mapping[str, Iterable[str]]) -> Mapping[str, tuple[str, ...]]:
    """The reads in all layers of a model, from those in its reduced model."""
    inside = ((tree.pattern(m), [name.removeprefix(full_name(m, "")) for name in names]) for m, names in reads.items())
    known = joined_reads({pattern: names} for pattern, names in inside)
    return {
        module: tuple(
            n for suffix in known[tree.pattern(module)] if (n := full_name(module, suffix)) in tree.parameters
        )
        for module in tree.modules
        if tree.pattern(module) in known
    }


# Results that code was seen to read. All others can be read only by hooks (a recorder of a router's logits), or by callers that set a flag
# to get them (hidden states).
Reads = Mapping[str, frozenset[int]]


def find_read_results(run: Trace) -> Reads:
    """Each module that returned something -> the positions in its result that code outside of it reads, or that a module around it returns."""
    found: dict[str, frozenset[int]] = {}
    for event in run.events:
        if event.kind == "leave" and event.module:
            named = [(n.partition(".")[0], number) for n, number in zip(event.names, event.inputs, strict=True)]
            inside = f"{event.module}."
            read = (n for n, i in named if not all(f"{one.module}.".startswith(inside) for one in run.readers[i]))
            found[event.module] = found.get(event.module, frozenset()) | {int(n) for n in read if n.isdecimal()}
    return found


def read_in_any(runs: Iterable[Reads]) -> Reads:
    """The results that are read in at least one run of the model."""
    found = by_key(one for run in runs for one in run.items())
    return {name: frozenset[int]().union(*positions) for name, positions in found.items()}


def read_results_of(tree: ModuleTree, read: Reads) -> Reads:
    """The reads in all layers of a model, from those in its reduced model."""
    known = read_in_any({tree.pattern(name): positions} for name, positions in read.items())
    return {name: known[tree.pattern(name)] for name in tree.modules if tree.pattern(name) in known}
