"""Partial sums that are reduced and then added to each other. Reduced together, they cost one collective.

A plan declares them with `sum_outputs`, and a run shows whether that is right. Those that no plan declares are found
for `shardplan init`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from shardplan.core.sum_outputs import SummedOutputs
from shardplan.core.tree import ModuleTree, block, element
from shardplan.model.reduced.trace import Event, Trace

ADDITIONS = frozenset(("add", "add_", "__add__", "__radd__", "__iadd__"))


@dataclass(frozen=True, slots=True)
class SharedSum:
    """Results in one block that its code adds up and reads nowhere else.

    Args:
        carriers: the modules whose partial sums can wait.
        closer: the module whose partial sum is reduced last.
        through: modules that the values pass on the way, unchanged on the reduced model (a dropout).
    """

    carriers: tuple[str, ...]
    closer: str
    through: tuple[str, ...] = ()

    @property
    def members(self) -> tuple[str, ...]:
        return (*self.carriers, self.closer)


@dataclass(frozen=True, slots=True)
class SeenSum:
    """What a run shows of one declared sum.

    Args:
        sum: the declared sum.
        wrong: why it does not hold, or "".
        module: the module that this is about.
        through: dropouts that the values pass on the way; here they drop nothing.
    """

    sum: SummedOutputs
    wrong: str = ""
    module: str = ""
    through: tuple[str, ...] = ()


def seen_sums(
    tree: ModuleTree, run: Trace, outputs: Iterable[tuple[int, str]], declared: Iterable[SummedOutputs]
) -> tuple[SeenSum, ...]:
    """Look at the sums that a plan declares, in each call of their blocks. A block that does not run gets no report.

    Args:
        tree: the tree of the modules that run.
        run: the run of a rank.
        outputs: (value, module) for each partial sum that a module reduces at its output.
    """
    by_member = {name: one for one in declared for name in one.members}
    if not by_member:
        return ()
    calls = _calls(run, set(outputs), by_member)
    found = []
    for one in dict.fromkeys(by_member.values()):
        seen = [_seen(tree, run, one, ran) for ran in calls.get(one.block, ())]
        wrong = [each for each in seen if each.wrong]
        through = dict.fromkeys(name for each in seen for name in each.through)
        found += wrong[:1] or ([SeenSum(one, through=tuple(through))] if seen else [])
    return tuple(found)


# The modules of one call, in the order of the run: (module, the partial sum that it outputs, or None).
_Call = list[tuple[str, int | None]]


def _calls(
    run: Trace, outputs: set[tuple[int, str]], by_member: Mapping[str, SummedOutputs]
) -> Mapping[str, list[_Call]]:
    """Block -> for each of its calls, the members of its sums that ran."""
    blocks = {one.block for one in by_member.values()}
    calls: dict[str, list[_Call]] = {name: [] for name in blocks}
    for event, running in run.with_running():
        if event.kind == "enter" and event.module in blocks:
            calls[event.module].append([])
        elif event.kind == "leave":
            one = by_member.get(event.module)
            if one is not None and one.block in running:
                value = event.outputs[0] if event.outputs and (event.outputs[0], event.module) in outputs else None
                calls[one.block][-1].append((event.module, value))
    return calls


def _seen(tree: ModuleTree, run: Trace, one: SummedOutputs, ran: _Call) -> SeenSum:
    """What one call of the block shows of a declared sum."""
    names = [name for name, _ in ran if name in one.members]
    if not names:
        return SeenSum(one)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        return SeenSum(one, "runs more than once in one call of the block", twice)
    if names[-1] != one.closer:
        why = (
            "runs before others of them: list the modules in the order in which they run"
            if one.closer in names
            else "does not run"
        )
        return SeenSum(one, f"is listed last, where the sum is reduced, but {why}", one.closer)
    values = {name: value for name, value in ran if name in one.members}
    without = next((name for name, value in values.items() if value is None), None)
    if without is not None:
        return SeenSum(one, "does not output a partial sum", without)
    paths = {name: _path(run, value, one.block) for name, value in values.items() if value is not None}
    last = set(paths[one.closer][0])
    for name, (path, _) in paths.items():
        if last.isdisjoint(path):
            return SeenSum(one, "is read by more than the sum with the last of these modules", name)
    passed = dict.fromkeys(module for _, modules in paths.values() for module in modules)
    changed = next((module for module in passed if tree.modules[module].kind != "dropout"), None)
    if changed is not None:
        return SeenSum(
            one, "passes its output through an operation that may change it on other batches (dropout in code)", changed
        )
    return SeenSum(one, through=tuple(passed))


def shared_sums(run: Trace, outputs: Iterable[tuple[int, str]]) -> tuple[SharedSum, ...]:
    """The sums that a block's code forms of reduced values.

    Args:
        run: the run of a rank.
        outputs: (value, module) for each partial sum that a module reduces at its output, in the order of the run.
    """
    outputs = tuple(outputs)
    times = Counter(module for _, module in outputs)
    once = [(number, module) for number, module in outputs if times[module] == 1 and element(block(module))]
    found = []
    for home, members in groupby(once, key=lambda one: block(one[1])):
        paths = [(module, *_path(run, number, home)) for number, module in members]
        for at, (closer, path, passed) in enumerate(paths):
            joining = [one for one in paths[:at] if not set(one[1]).isdisjoint(path)]
            if joining and not any(not set(one[1]).isdisjoint(path) for one in paths[at + 1 :]):
                through = dict.fromkeys(name for one in (*joining, (closer, path, passed)) for name in one[2])
                found.append(SharedSum(tuple(one[0] for one in joining), closer, tuple(through)))
    return tuple(found)


def in_every_block(sums: Sequence[SharedSum], blocks: Iterable[str]) -> bool:
    """Whether each of the blocks has the same sums."""
    relative = [{_relative(one, name) for one in sums if block(one.closer) == name} for name in blocks]
    return all(one == relative[0] for one in relative)


def _relative(one: SharedSum, home: str) -> SharedSum:
    carriers, through = (tuple(name.removeprefix(home) for name in names) for names in (one.carriers, one.through))
    return SharedSum(carriers, one.closer.removeprefix(home), through)


def _path(run: Trace, number: int, home: str) -> tuple[list[int], list[str]]:
    """Follow a value through its block as long as only one addition reads it. Returns the values on the way, and the
    modules that it passes unchanged."""
    path: list[int] = [number]
    passed: list[str] = []
    while True:
        step = None
        for event in run.readers.get(number, ()):
            if event.kind in ("enter", "leave"):
                if event.module == home or number not in event.outputs:
                    return path, passed  # the value leaves the block, or is moved
                continue
            if event.kind != "op" or step is not None:
                return path, passed
            if number in event.outputs and event.name not in ADDITIONS:
                passed.append(event.module)
                continue
            step = event
        if step is None or not _is_sum(run, step):
            return path, passed
        number = step.outputs[0]
        path.append(number)


def _is_sum(run: Trace, event: Event) -> bool:
    """Whether an operation's result is the plain sum of two values."""
    if event.name not in ADDITIONS or len(event.inputs) != 2 or len(event.outputs) != 1:
        return False
    one, other = (run.values[number] for number in event.inputs)
    result = run.values[event.outputs[0]]
    return one.shape == other.shape == result.shape and torch.allclose(one + other, result)
