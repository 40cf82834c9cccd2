"""Partial sums that are added to each other once they are reduced: reduced together, they cost one collective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from shardplan.core.tree import block, element
from shardplan.twin.trace import Event, Trace

ADDITIONS = frozenset(("add", "add_", "__add__", "__radd__", "__iadd__"))


@dataclass(frozen=True, slots=True)
class SharedSum:
    """Results of one block that its code adds up, and reads nowhere else.

    Args:
        carriers: the modules whose partial sums can wait.
        closer: the module whose partial sum is reduced last.
        through: modules whose code the values pass on the way, unchanged on the small copy (a dropout).
    """

    carriers: tuple[str, ...]
    closer: str
    through: tuple[str, ...] = ()

    @property
    def members(self) -> tuple[str, ...]:
        return (*self.carriers, self.closer)


def shared_sums(run: Trace, handed: Iterable[tuple[int, str]]) -> tuple[SharedSum, ...]:
    """The sums that a block's code makes of reduced values.

    Args:
        run: of a rank.
        handed: (value, module) for each partial sum that a module reduces as it hands it on, in the order of the run.
    """
    reading = run.readers()
    times = dict.fromkeys((module for _, module in handed), 0)
    for _, module in handed:
        times[module] += 1
    once = [(number, module) for number, module in handed if times[module] == 1 and element(block(module))]
    found = []
    for home, members in groupby(once, key=lambda one: block(one[1])):
        paths = [(module, *_path(run, reading, number, home)) for number, module in members]
        for at, (closer, path, passed) in enumerate(paths):
            joining = [one for one in paths[:at] if not set(one[1]).isdisjoint(path)]
            if joining and not any(not set(one[1]).isdisjoint(path) for one in paths[at + 1 :]):
                through = dict.fromkeys(name for one in (*joining, (closer, path, passed)) for name in one[2])
                found.append(SharedSum(tuple(one[0] for one in joining), closer, tuple(through)))
    return tuple(found)


def in_every_block(sums: Sequence[SharedSum], blocks: Iterable[str]) -> bool:
    """Whether each of the blocks has the same sums."""
    said = [{_relative(one, name) for one in sums if block(one.closer) == name} for name in blocks]
    return all(one == said[0] for one in said)


def _relative(one: SharedSum, home: str) -> SharedSum:
    carriers, through = (tuple(name.removeprefix(home) for name in names) for names in (one.carriers, one.through))
    return SharedSum(carriers, one.closer.removeprefix(home), through)


def moved(one: SharedSum, home: str) -> SharedSum:
    """The same in another block."""
    own = block(one.closer)
    carriers, through = (tuple(home + n.removeprefix(own) for n in names) for names in (one.carriers, one.through))
    return SharedSum(carriers, home + one.closer.removeprefix(own), through)


def _path(run: Trace, reading: Mapping[int, Sequence[Event]], number: int, home: str) -> tuple[list[int], list[str]]:
    """The values that a value becomes by additions alone, each read once, within its block; and the modules whose code it
    passes as it is."""
    path, passed = [number], []
    while True:
        step = None
        for event in reading.get(number, ()):
            if event.kind in ("enter", "leave"):
                if event.module == home or number not in event.outputs:
                    return path, passed  # it leaves the block, or is moved
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
