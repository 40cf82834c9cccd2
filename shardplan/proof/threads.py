"""All ranks in one process: one thread each, with torch's process group for threads."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist

from shardplan.torchlib.fakes import keep_device_guard
from shardplan.torchlib.private import private
from shardplan.torchlib.rank_group import BACKEND, RankGroup, Turn, compared_collectives

T = TypeVar("T")
OFTEN = 0.1  # seconds between checks whether ranks wait for a rank that has ended

Calls = SimpleQueue[tuple[Callable[[int], Any], "Future[Any]"] | None]  # of one rank; None ends it


class OnRanks(Protocol):
    """Calls a function on every rank."""

    def __call__(self, function: Callable[[int], T], /) -> list[T]: ...


@contextmanager
def rank_threads(ranks: int) -> Iterator[OnRanks]:
    """Threads for the ranks of a process group. They last as long as the context, so that the next call can use what torch
    remembers by thread, such as how DTensor does an operation. Calls run one after the other; a call that raises is the last.

    Each thread has its own torch modes and process groups; the groups of the process are hidden until the context ends. Ranks
    share everything outside their own modules (globals of the code, the default dtype).

    The yielded object calls a function of the rank on every rank, and returns all results; the default process group exists
    while it runs. It raises:
        RuntimeError: all ranks that have not ended wait for others; or a sent tensor is not received.
        Exception: the exception of the first rank that raised.
    """
    calls: list[Calls] = [SimpleQueue() for _ in range(ranks)]
    keep_device_guard()  # DTensor makes tensors without memory
    with _threaded_groups():
        store, turn = dist.HashStore(), Turn()
        threads = [
            threading.Thread(target=_serve, args=(rank, ranks, store, calls[rank], turn), name=f"rank {rank}")
            for rank in range(ranks)
        ]
        for thread in threads:
            thread.start()
        try:
            yield lambda function: _on_all(calls, function)
        finally:
            for queue in calls:
                queue.put(None)
            for thread in threads:
                thread.join()


def on_threads(ranks: int, function: Callable[[int], T]) -> list[T]:
    """One call of a function on every rank, with `rank_threads`."""
    with rank_threads(ranks) as on_ranks:
        return on_ranks(function)


def _serve(rank: int, ranks: int, store: dist.Store, calls: Calls, turn: Turn) -> None:
    """One rank: runs calls."""
    try:
        while (call := calls.get()) is not None:
            function, result = call
            try:
                with turn.taken():
                    if not dist.is_initialized():
                        dist.init_process_group(BACKEND, rank=rank, world_size=ranks, store=store)
                    result.set_result(function(rank))
            except BaseException as error:  # from a rank that waited for one that raised: SystemExit
                RankGroup.exception_handle(error)
                result.set_exception(error)
            del call, function, result  # and with them the models of the call
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _without_collections() -> Iterator[None]:
    """Nothing collects cyclic garbage in this context. `torch.Generator.get_state`, which checkpoints call, makes a Python object while it
    holds the generator's lock. A collection that begins there runs finalizers, and another rank gets the interpreter: if that one asks for the
    lock, it waits for ever, and keeps the interpreter."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@_without_collections()
def _on_all(calls: Sequence[Calls], function: Callable[[int], T]) -> list[T]:
    results: list[Future[T]] = [Future() for _ in calls]
    for queue, result in zip(calls, results, strict=True):
        queue.put((function, result))
    try:
        _wait_for(results)
    except BaseException as error:
        RankGroup.exception_handle(error)
        wait(results)
        raise
    errors = [raised for result in results if (raised := result.exception()) is not None]
    for raised in sorted(errors, key=lambda raised: isinstance(raised, SystemExit)):
        raise RankGroup.first or raised if isinstance(raised, SystemExit) else raised
    if (lost := RankGroup.unreceived()) is not None:
        raise RuntimeError(lost)
    return [result.result() for result in results]


@contextmanager
def _threaded_groups() -> Iterator[None]:
    install, isolate = private("install_threaded_groups"), private("isolate_threads")
    # Installing it makes autograd run in one thread; torch 2.11 does not undo that.
    with torch.autograd.set_multithreading_enabled(False):
        world = install()
        if not hasattr(world, "comms"):  # of torchcomms: torch 2.11 reads this list, which this world does not have
            world.comms = []
        isolate(True)
        try:
            # init_process_group has a hook that prefixes lines with "[rank0]:"
            with patch.object(sys, "excepthook", sys.excepthook), compared_collectives():
                yield
        finally:
            RankGroup.reset()
            isolate(False)
            private("uninstall_threaded_groups")()


def _wait_for(results: Sequence[Future[Any]]) -> None:
    """Wait until all results are there.

    Raises:
        RuntimeError: all remaining ranks wait for others, in collectives or for messages that will never come.
    """
    before: frozenset[object] = frozenset()
    while left := wait(results, OFTEN).not_done:
        now, count = RankGroup.waiting()
        ended = [rank for rank, result in enumerate(results) if result not in left]
        alive = all(results[rank].exception() is None for rank in ended)  # else the others are told to end
        if alive and count == len(left) and now == before:
            names = ", ".join(f"rank {rank}" for rank in ended)
            who = f"{names} ended, but the other ranks" if ended else "all ranks"
            raise RuntimeError(f"{who} wait in a collective, or for a value that no rank sends")
        before = now
