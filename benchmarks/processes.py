"""Whole processes measured in turns, so that what disturbs one disturbs the others."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.multiprocessing.spawn import start_processes

from .page import ratio_text


@dataclass(frozen=True, slots=True)
class Costs:
    """The seconds that a process took in each turn: of the wall clock, and of the processor (its own and the system's)."""

    wall: tuple[float, ...]
    cpu: tuple[float, ...]


def in_turns(commands: Mapping[str, Sequence[str]], repeats: int, *, allowed: Sequence[int] = (0,)) -> dict[str, Costs]:
    """Run each command once unmeasured, then all of them in turns.

    Args:
        commands: words after `python`, by name.
        allowed: exit codes that are as they should be.

    Raises:
        RuntimeError: another exit code.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for turn in range(repeats + 1):
        for name, words in commands.items():
            taken = _run([sys.executable, *words], allowed)
            if turn:
                times[name].append(taken)
    return {name: Costs(*zip(*taken, strict=True)) for name, taken in times.items()}


def _run(words: Sequence[str], allowed: Sequence[int]) -> tuple[float, float]:
    # Modules are imported from their bytecode, as in a process of a user.
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")}
    silent = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_WRONLY, 0) for stream in (1, 2)]
    start = time.perf_counter()
    pid = os.posix_spawn(words[0], words, {**environment, "OMP_NUM_THREADS": "1"}, file_actions=silent)
    _, status, used = os.wait4(pid, 0)
    wall = time.perf_counter() - start
    if os.waitstatus_to_exitcode(status) not in allowed:
        raise RuntimeError(f"{' '.join(words)} ended with {os.waitstatus_to_exitcode(status)}")
    return wall, used.ru_utime + used.ru_stime


def on_processes(function: Callable[..., None], arguments: tuple[Any, ...], count: int) -> None:
    """Run `function(rank, *arguments)` on `count` processes.

    They are forked from a server and so end without Python's finalization, in which a thread of gloo or of the profiler that
    asks for the interpreter aborts the process (seen once in forty runs). A rank that fails raises as `mp.spawn` does.
    """
    start_processes(function, arguments, count, start_method="forkserver")


def row(what: str, goal: str, measured: Costs, base: Costs) -> list[str]:
    """A line of a table: what / goal / ratio of wall time / ratio of processor time / seconds of both."""
    seconds = f"{statistics.median(measured.wall):.2f} s, {statistics.median(base.wall):.2f} s"
    return [what, goal, ratio_text(measured.wall, base.wall), ratio_text(measured.cpu, base.cpu), seconds]
