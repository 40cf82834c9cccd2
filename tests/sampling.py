"""Samples of long matrices: `make test-all` has the same few in each run, `make exhaustive` has the rest. The share of a judge: `--share 10
--seed 7` is one in ten of its cases, drawn by that seed."""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings

SEED = 11
MOVED = Path(__file__).with_name("moved.txt")
T = TypeVar("T")


def add_share(parser: argparse.ArgumentParser) -> None:
    """The options of a judge that `share_of` reads."""
    parser.add_argument("--share", type=int, default=1, metavar="N", help="one in N of the cases (all)")
    parser.add_argument("--seed", type=int, default=0, help="what is drawn by")


def share_of(cases: Iterable[T], given: argparse.Namespace) -> list[T]:
    """One in `given.share` of the cases, at least one, drawn by `given.seed`; in their order. As many seeds as there are shares, from a
    multiple of their number on, have all cases together."""
    every = list(cases)
    turn, first = divmod(given.seed, given.share)
    drawn = random.Random(turn).sample(range(len(every)), len(every))
    kept = {*drawn[first % max(len(every), 1) :: given.share]}
    return [case for index, case in enumerate(every) if index in kept]


def examples(count: int) -> int:
    """How many examples a drawn test has: all in `make exhaustive`, which draws others each time; a third where each run has the same."""
    return -(-count // 3) if settings().derandomize else count


def sampled(
    cases: Iterable[Any], count: int, *, long: Iterable[Any] = (), marks: Iterable[pytest.MarkDecorator] = ()
) -> list[Any]:
    """The cases of a slow test, in their order. All but `count` of them, drawn by a fixed seed, are marked exhaustive.

    Args:
        long: what takes a minute or more, which is never drawn.
        marks: of those that are drawn.
    """
    every = list(cases)
    kept = _drawn(every, count, long)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=(*marks,) if index in kept else pytest.mark.exhaustive,
        )
        for index, case in enumerate(every)
    ]


def few(cases: Iterable[T], count: int, *, long: Iterable[T] = ()) -> list[T]:
    """The cases that a slow test has of those that a judge has whole, in their order. They are drawn as by `sampled`."""
    every = list(cases)
    kept = _drawn(every, count, long)
    return [case for index, case in enumerate(every) if index in kept]


def _drawn(every: Sequence[Any], count: int, long: Iterable[Any]) -> set[int]:
    never = list(long)
    return {*random.Random(SEED).sample([index for index, case in enumerate(every) if case not in never], count)}


def move(items: Sequence[pytest.Item]) -> list[str]:
    """Mark the tests that `moved.txt` names. Of those that stay in part, its number is left as it was.

    Returns:
        The lines that move none of the tests.
    """
    idle = []
    by_name = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        for name in {item.nodeid, item.nodeid.partition("[")[0]}:
            by_name[name].append(item)
    mark = ""
    for line in MOVED.read_text("utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        if not line.startswith("tests/"):
            mark = line.partition(":")[0]
            continue
        name, _, count = line.rpartition(" ") if line.rpartition(" ")[2].isdigit() else (line, "", "0")
        # Those that would run where the list finds them: nothing is moved twice.
        found = [item for item in by_name[name] if _set_of(item) == ("slow" if mark == "exhaustive" else "")]
        if len(found) <= int(count):
            idle.append(line)
        kept = {*random.Random(SEED).sample(range(len(found)), min(int(count), len(found)))}
        for index, item in enumerate(found):
            if index not in kept:
                item.add_marker(mark)
    return idle


def _set_of(item: pytest.Item) -> str:
    return next((mark for mark in ("exhaustive", "slow") if item.get_closest_marker(mark)), "")
