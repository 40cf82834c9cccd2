"""Parameters that a module's code reads of a module below it (`self.conv.weight`, not `self.conv(x)`)."""

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
