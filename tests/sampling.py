"""Samples of long matrices: `make test-all` has the same few in each run, `make exhaustive` has the rest. The share of a judge: `--share 10
--seed 7` is one in ten of its cases, drawn by that seed."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

SEED = 11
T = TypeVar("T")


def add_share(parser: argparse.ArgumentParser) -> None:
    """The options of a judge that `share_of` reads."""
    parser.add_argument("--share", type=int, default=1, metavar="N", help="one in N of the cases (all)")
    parser.add_argument("--seed", type=int, default=0, help="what is drawn by")


def share_of(cases: Iterable[T], given: argparse.Namespace) -> list[T]:
    """One in `given.share` of the cases, at least one, drawn by `given.seed`; in their order."""
    every = list(cases)
    kept = {*random.Random(given.seed).sample(range(len(every)), -(-len(every) // given.share))}
    return [case for index, case in enumerate(every) if index in kept]


def sampled(
    cases: Iterable[Any], count: int, *, long: Iterable[Any] = (), marks: Iterable[pytest.MarkDecorator] = ()
) -> list[Any]:
    """The cases of a slow test, in their order. All but `count` of them, drawn by a fixed seed, are marked exhaustive.

    Args:
        long: what takes a minute or more, which is never drawn.
        marks: of those that are drawn.
    """
    every, never = list(cases), list(long)
    short = [index for index, case in enumerate(every) if case not in never]
    kept = {*random.Random(SEED).sample(short, count)}
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=(*marks,) if index in kept else pytest.mark.exhaustive,
        )
        for index, case in enumerate(every)
    ]
