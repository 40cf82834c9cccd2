"""Running something in a forked copy of this process: it may end by a signal, and process groups are its own to make."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from shardplan.torchlib.private import private

T = TypeVar("T")


class ChildEnded(Exception):
    """The copy ended by a signal, or without an answer."""


def in_child(function: Callable[[], T]) -> T:
    """What a function returns, called in a forked copy of this process.

    The copy sees the process groups of this one as not there, computes on the CPU with one thread, as torch's data loaders
    do, and leaves without a clean-up that the groups would take for their own.

    Raises:
        ChildEnded: it ended by a signal.
        Exception: what the function raised.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        _answer(function, send)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        raise ChildEnded(f"the process ended by the signal {signal.Signals(os.WTERMSIG(status)).name}")
    if not said:
        raise ChildEnded(f"the process ended with exit code {os.waitstatus_to_exitcode(status)}")
    fine, result = pickle.loads(said)
    if not fine:
        raise result
    return result


def _answer(function: Callable[[], Any], send: int) -> None:
    """Never returns: nothing of the parent's stack may run twice."""
    code = 1
    try:
        torch.set_num_threads(1)
        _forget_process_groups()
        try:
            said = pickle.dumps((True, function()))
        except Exception as error:
            said = pickle.dumps((False, _portable(error)))
        with os.fdopen(send, "wb") as pipe:
            pipe.write(said)
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def _portable(error: Exception) -> Exception:
    """An exception that another process can read."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


_kept: list[Any] = []  # what is let go would be shut down


def axis_name() -> str:
    """What a simulated tp axis is called. In a forked copy it has a name that no mesh of the parent has: torch keeps what it
    knows of meshes by their names and sizes, with groups that are not there in the copy."""
    return f"tp of process {os.getpid()}" if _kept else "tp"


def _forget_process_groups() -> None:
    world = private("process_groups")
    tables = (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.tags_to_pg,
        world.pg_coalesce_state,
    )
    _kept.extend([world.default_pg, *(dict(table) for table in tables)])
    world.default_pg = None
    for table in tables:
        table.clear()
    private("unregister_process_groups")()
    world.group_count = 0  # as after destroy_process_group: a mesh that torch remembers finds its group by the same name
