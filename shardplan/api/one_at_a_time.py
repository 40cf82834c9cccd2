"""Functions that run a model; a process runs one of them at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_running = threading.RLock()


def one_at_a_time(function: Callable[P, T]) -> Callable[P, T]:
    """Let calls from several threads wait for each other: while a model runs, functions of torch are replaced in all threads."""

    @wraps(function)
    def run(*args: P.args, **options: P.kwargs) -> T:
        with _running:
            return function(*args, **options)

    return run
