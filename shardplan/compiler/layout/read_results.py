"""Results of modules that the model's code was seen to read. All others can be read only by hooks (a recorder of a
router's logits), or by callers that set a flag to get them (hidden states)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from shardplan.core.tree import ModuleTree
from shardplan.model.reduced.trace import Trace

Reads = Mapping[str, frozenset[int]]


def find_read_results(run: Trace) -> Reads:
    """Each module that returned something -> the positions in its result that code outside of it reads, or that a module around it returns."""
    found: dict[str, frozenset[int]] = {}
    for event in run.events:
        if event.kind == "leave" and event.module:
            named = [(n.partition(".")[0], number) for n, number in zip(event.names, event.inputs, strict=True)]
            read = (
                n for n, number in named if not all(_within(one.module, event.module) for one in run.readers[number])
            )
            found[event.module] = found.get(event.module, frozenset()) | {int(n) for n in read if n.isdecimal()}
    return found


def _within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def read_in_any(runs: Iterable[Reads]) -> Reads:
    """The results that are read in at least one run of the model."""
    found: dict[str, frozenset[int]] = defaultdict(frozenset)
    for run in runs:
        for name, positions in run.items():
            found[name] |= positions
    return dict(found)


def read_results_of(tree: ModuleTree, read: Reads) -> Reads:
    """The reads in all layers of a model, from those in its reduced model."""
    known = read_in_any({tree.pattern(name): positions} for name, positions in read.items())
    return {name: known[tree.pattern(name)] for name in tree.modules if tree.pattern(name) in known}
