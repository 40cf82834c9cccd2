"""Samples of long matrices: `make test-all` has the same few in each run, `make exhaustive` has the rest."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

SEED = 11


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
