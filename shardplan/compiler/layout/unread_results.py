"""Results of modules that no code of the model was seen to read: only hooks can (a recorder of a router's logits)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardplan.core.tree import ModuleTree
from shardplan.model.reduced.trace import Trace


def find_unread_results(run: Trace) -> Mapping[str, frozenset[int]]:
    """Each module that returned a tuple -> the positions that nothing outside of it reads, and no module around it returns, in any call."""
    readers: dict[int, set[str]] = {}
    for event in run.events:
        for number in event.inputs:
            readers.setdefault(number, set()).add(event.module)
    found: dict[str, frozenset[int]] = {}
    for event in run.events:
        if event.kind == "leave" and event.module:
            named = [(int(n), number) for n, number in zip(event.names, event.inputs, strict=True) if n.isdecimal()]
            unread = frozenset(n for n, number in named if all(_within(one, event.module) for one in readers[number]))
            found[event.module] = found.get(event.module, unread) & unread
    return found


def _within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def unread_in_all(runs: Iterable[Mapping[str, frozenset[int]]]) -> Mapping[str, frozenset[int]]:
    """What is unread in each run of the model."""
    found: dict[str, frozenset[int]] = {}
    for run in runs:
        found |= {name: found.get(name, positions) & positions for name, positions in run.items()}
    return found


def unread_results_of(tree: ModuleTree, unread: Mapping[str, frozenset[int]]) -> Mapping[str, frozenset[int]]:
    """The same in all layers of a model, from its reduced model's."""
    known = unread_in_all({tree.pattern(name): positions} for name, positions in unread.items())
    return {name: known[tree.pattern(name)] for name in tree.modules if tree.pattern(name) in known}
