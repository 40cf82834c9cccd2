"""Results of modules that the model's code was seen to read. All others can be read only by hooks (a recorder of a
router's logits), or by callers that set a flag to get them (hidden states)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardplan.core.by_key import by_key
from shardplan.core.tree import ModuleTree
from shardplan.model.reduced.trace import Trace

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
