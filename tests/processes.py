"""Running a function on N real processes: gloo on the CPU, one process per rank, kept for the next call.

    results = on_ranks(4, function, *arguments)  # function(*arguments) on every rank; what each returned, by rank

The function is a module's own (it is pickled), and asks `torch.distributed` for its rank. A group is kept until
another number of ranks is asked for, a call goes wrong, or calls have made many groups of their own. The imports,
several seconds of them, are paid once: the processes are forked from a server that has torch, transformers and
shardplan loaded and runs nothing.

Runs that are held against the unsharded model here are applied with `prove=False`: they are the proof.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

START = 240.0  # seconds for the imports, on a busy machine
LOADED = (
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.auto.modeling_auto",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.phi3.modeling_phi3",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.trainer",
    "peft",
    "pytest",
    "shardplan.api",
    "shardplan.compat",
    "shardplan.proof.processes",
    "shardplan.proof.prove_stages",
    "shardplan.weights",
    "tests.compiling",
)
GRACE = 5.0  # seconds for the other ranks' own errors, after the first one


class RanksFailed(Exception):
    """What went wrong on which rank: the rank's own traceback, its death, or the time-out."""

    def __init__(self, errors: dict[int, str]):
        self.errors = errors
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in sorted(errors.items())))


def fork_server() -> ForkServerContext:
    """Where processes are forked from. The first of a process decides what is imported there: if that is a command that is tested, each
    rank of the tests after it imports the rest, seconds of it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(LOADED))
    ensure_running()
    return context


class Ranks:
    """A group of processes that hold one gloo process group."""

    def __init__(self, count: int):
        context = fork_server()
        self.folder = tempfile.TemporaryDirectory()
        self.connections, self.processes, self.made = [], [], 0
        for rank in range(count):
            ours, theirs = context.Pipe()
            arguments = (rank, count, Path(self.folder.name), theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)
        try:
            self._answers(time.monotonic() + START)
        except RanksFailed:
            self.close()
            raise

    def call(self, function: Callable[..., Any], arguments: tuple, seconds: float) -> list[Any]:
        task = pickle.dumps((function, arguments))
        for connection in self.connections:
            connection.send_bytes(task)
        return self._answers(time.monotonic() + seconds)

    def _answers(self, deadline: float) -> list[Any]:
        waiting: dict[Connection, int] = {connection: rank for rank, connection in enumerate(self.connections)}
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                errors |= {rank: f"no answer in time, it is in:\n{self._stack(rank)}" for rank in waiting.values()}
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    fine, value, self.made = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    self.processes[rank].join(GRACE)
                    fine, value = False, f"died with exit code {self.processes[rank].exitcode}"
                (results if fine else errors)[rank] = value
                if not fine:
                    deadline = min(deadline, time.monotonic() + GRACE)
        if errors:
            raise RanksFailed(errors)
        return [results[rank] for rank in sorted(results)]

    def _stack(self, rank: int) -> str:
        """Where a rank is."""
        process, report = self.processes[rank], _report(Path(self.folder.name), rank)
        if process.is_alive() and report.exists() and process.pid is not None:
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(1.0)
            return report.read_text()
        return "its start"

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.folder.cleanup()


_group: Ranks | None = None
# Process groups of a rank before it is replaced: one of gloo has a thread that wakes 100 times a second. A call's groups cannot
# be ended after it: DTensor's caches give later meshes of the same shape the earlier one.
MOST_MADE = 24


def on_ranks(count: int, function: Callable[..., Any], *arguments: Any, seconds: float = 300.0) -> list[Any]:
    """Call a function on `count` ranks.

    Args:
        seconds: what the call may take before it counts as hanging.

    Returns:
        What it returned, by rank.

    Raises:
        RanksFailed: it raised, died or hung on some rank.
    """
    global _group
    if _group is None or len(_group.processes) != count or _group.made > MOST_MADE:
        stop()
        _group = Ranks(count)
    try:
        return _group.call(function, arguments, seconds)
    except BaseException:
        stop()
        raise


def raised(call: Callable[..., Any], *arguments: Any, kind: type[Exception] = RuntimeError, **given: Any) -> str:
    """What a call says that it raises an error of this kind; "" if it does not. For functions that go on after it on all ranks."""
    try:
        call(*arguments, **given)
    except kind as error:
        return str(error)
    return ""


def stop() -> None:
    """End the group, if there is one."""
    global _group
    if _group is not None:
        _group.close()
        _group = None


atexit.register(stop)


def _report(folder: Path, rank: int) -> Path:
    """The file that a rank writes its stack to when it gets SIGUSR1."""
    return folder / f"stack-{rank}"


def _serve(rank: int, count: int, folder: Path, connection: Connection) -> None:
    """One rank: answer calls until the other end is closed."""
    report = _report(folder, rank).open("w")  # open as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=report)
    import torch
    import torch.distributed as dist

    import shardplan  # noqa: F401
    from tests.compiling import compile_once

    gc.freeze()  # collections pass over what is imported
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=300),
    )
    compile_once()
    connection.send_bytes(pickle.dumps((True, None, 0)))
    while True:
        try:
            function, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = (True, function(*arguments))
        except BaseException:  # pytest's own failures are no Exception
            answer = (False, traceback.format_exc())
        connection.send_bytes(pickle.dumps((*answer, len(dist.distributed_c10d._world.pg_map))))
