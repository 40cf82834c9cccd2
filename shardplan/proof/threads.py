"""All ranks in one process: a thread each, with torch's process group for threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from shardplan.torchlib.private import private

T = TypeVar("T")
OFTEN = 0.1  # seconds between two looks at whether ranks wait for one that has ended


def on_threads(ranks: int, function: Callable[[int], T]) -> list[T]:
    """Call a function on every rank, and return what each returned.

    Each thread has torch's modes, and process groups, of its own; the groups of the process are hidden until all have
    ended. Ranks share everything outside their own modules (globals of the code, the default dtype).

    Args:
        function: of the rank; the default process group is there while it runs.

    Raises:
        RuntimeError: a rank has ended, and others wait for it in a collective.
        Exception: what the first rank that raised did.
    """
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}
    group = private("ThreadedGroup")

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
            results[rank] = function(rank)
        except BaseException as error:  # of a rank that waited for one that raised: SystemExit
            errors[rank] = error
            group.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    with _threaded_groups():
        store = dist.HashStore()
        threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(ranks)]
        try:
            for thread in threads:
                thread.start()
            _wait_for(threads, errors)
        except BaseException as error:
            group.exception_handle(error)
            raise
        finally:
            for thread in threads:
                thread.join()
    for _, raised in sorted(errors.items(), key=lambda one: (isinstance(one[1], SystemExit), one[0])):
        raise raised
    return [results[rank] for rank in range(ranks)]


@contextmanager
def _threaded_groups() -> Iterator[None]:
    install, isolate = private("install_threaded_groups"), private("isolate_threads")
    install()
    isolate(True)
    try:
        yield
    finally:
        private("ThreadedGroup").reset()
        isolate(False)
        private("uninstall_threaded_groups")()


def _wait_for(threads: list[threading.Thread], errors: Mapping[int, BaseException]) -> None:
    """Until all have ended.

    Raises:
        RuntimeError: some have, without an error, and all others wait in a collective, which then never comes about.
    """
    group = private("ThreadedGroup")
    for thread in threads:
        while thread.is_alive():
            thread.join(OFTEN)
            left = [one for one in threads if one.is_alive()]
            waiting: list[Any] = list(group._cur_coll_on_pgs.values())
            stuck = any(one._count == len(left) < one._world_size for one in waiting)
            if stuck and 0 < len(left) < len(threads) and not errors:
                names = ", ".join(one.name for one in threads if one not in left)
                raise RuntimeError(f"{names} ended, but the other ranks wait in a collective")
