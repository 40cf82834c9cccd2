"""Processes that judge rows, each row with a bound on its time: one that takes longer, or ends its process, is told and the others go on."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

SECONDS = 600  # of processor time, for a row
WAITING = 10  # times as many seconds, whatever they were spent on: a row that waits for ever uses no processor time
TASKS = 8  # of a process: what a model leaves behind does not pile up
R = TypeVar("R")


def each(make: Callable[[R], Any], rows: Sequence[R], jobs: int, seconds: int) -> Iterator[tuple[R, Any | str, float]]:
    """Row, what is made of it, and the seconds of processor time that this took, in the order in which they end.

    Args:
        make: of a module that processes can import.
        seconds: of processor time, for a row.

    Returns:
        In place of what is made, the text that says why there is nothing.
    """
    left = list(rows)
    running: dict[Connection, tuple[Any, list[R], R]] = {}
    context = get_context("spawn")
    try:
        while left or running:
            while left and len(running) < jobs:
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(make, seconds, WAITING * seconds, theirs), daemon=True)
                process.start()
                theirs.close()
                ours.send(row := left.pop(0))
                running[ours] = process, [row], row
            for one in wait([*running]):
                process, done, row = running[one]
                try:
                    made, used = one.recv()
                except EOFError:
                    process.join()
                    is_long = process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL, -signal.SIGALRM)
                    made = f"takes more than {seconds} s" if is_long else f"ends the process ({process.exitcode})"
                    used, done = float(seconds), [row] * TASKS
                if left and len(done) < TASKS:
                    one.send(following := left.pop(0))
                    running[one] = process, [*done, following], following
                else:
                    one.close()
                    del running[one]
                yield row, made, used
    finally:
        for process, _, _ in running.values():
            process.kill()


def _work(make: Callable[[R], Any], seconds: int, waiting: int, to: Connection) -> None:
    while True:
        try:
            row = to.recv()
        except EOFError:  # nothing is left
            return
        begun = _used()
        resource.setrlimit(resource.RLIMIT_CPU, (int(begun) + seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        signal.alarm(waiting)
        try:
            made = make(row)
        except Exception as error:  # of the model's own code
            made = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        signal.alarm(0)
        to.send((made, _used() - begun))


def _used() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
