"""All ranks continue, or all raise."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardplan.runtime.parallel.process_groups import named_ranks
from shardplan.torchlib.gathering import of_all
from shardplan.torchlib.private import private

PATIENCE = 5.0  # after this many seconds a warning says which ranks are waited for
_calls: Counter[tuple[str, tuple[int, ...]]] = Counter()


@contextmanager
def all_or_none(mesh: DeviceMesh | None, doing: str, call: str = "") -> Iterator[Callable[[object], None]]:
    """Do the work of this context on all ranks of a mesh, and check at its end that it succeeded on all.

    The context yields a function for values that must be equal on all ranks. They must be picklable and
    comparable.

    Args:
        mesh: its ranks take part; None: all ranks of the default process group.
        doing: a description of the work, for messages.
        call: the name of the function whose call this begins. A rank that waits for ranks that have not called it warns after
            a few seconds, and names them.

    Raises:
        RuntimeError: another rank failed (the message names it, with its error), or the values differ. The rank that
            failed raises its own error.
    """
    # A fake process group has no other ranks to wait for, and its store keeps nothing.
    waits = call and dist.get_world_size() > 1 and dist.get_backend() != "fake"
    called: _Called | None = None
    reported: list[object] = []
    failure: Exception | None = None
    try:
        called = _Called(mesh, call) if waits else None
    except Exception as error:  # the store may fail on this rank alone
        failure = error
    try:
        yield reported.append
    except Exception as error:
        failure = failure or error
    outcome = (dist.get_rank(), None if failure is None else f"{type(failure).__name__}: {failure}", reported)
    try:
        with called.watched() if called else nullcontext():
            answers = _everyone(outcome, mesh)
    except Exception as error:  # a rank died; if this rank failed, that is the cause
        if called and failure is None and (text := called.missing()):
            raise RuntimeError(text) from error
        raise failure or error from error
    if failure is not None:
        raise failure
    failed = [(rank, text) for rank, text, _ in answers if text is not None]
    if failed:
        raise RuntimeError(f"{doing} failed on {named_ranks(rank for rank, _ in failed)}: {failed[0][1]}")
    different = [rank for rank, _, other in answers if other != answers[0][2]]
    if different:
        raise RuntimeError(
            f"{doing}: {named_ranks(different, ('differs', 'differ'))} from rank {answers[0][0]}; "
            "all ranks need the same arguments and the same files"
        )


def _everyone(value: Any, mesh: DeviceMesh | None) -> list[Any]:
    """The value of each rank, in the same order on all."""
    values = [value]
    for group in [None] if mesh is None else [mesh.get_group(axis) for axis in range(mesh.ndim)]:
        values = [one for part in of_all(values, group) for one in part]
    return values


class _Called:
    """A call of a function that every rank of a mesh is to call."""

    def __init__(self, mesh: DeviceMesh | None, name: str):
        self.name = name
        self.ranks = tuple(range(dist.get_world_size()) if mesh is None else mesh.mesh.flatten().tolist())
        self.store = private("default_store")()
        _calls[name, self.ranks] += 1
        self.count = str(_calls[name, self.ranks])
        self.store.set(self._key(dist.get_rank()), self.count)

    def _key(self, rank: int) -> str:
        return f"shardplan/{self.name}/{self.ranks[0]}+{len(self.ranks)}/{rank}"

    def missing(self) -> str:
        """A text about the ranks that have not called it; empty where all have."""
        keys = {rank: self._key(rank) for rank in self.ranks}
        here = {rank for rank, key in keys.items() if self.store.check([key]) and self._number(key) >= int(self.count)}
        late = [rank for rank in self.ranks if rank not in here]
        if not late:
            return ""
        who = named_ranks(late, ("has", "have"))
        return (
            f"{self.name} waits on rank {dist.get_rank()}: {who} not called it. Call it on all ranks, "
            "not under `if rank == 0:`"
        )

    def _number(self, key: str) -> int:
        return int(self.store.get(key))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Warn if the work in this context takes long because other ranks are missing."""
        timer = threading.Timer(PATIENCE, self._warn)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _warn(self) -> None:
        if text := self.missing():
            warnings.warn(text, stacklevel=1)


def of_first(value: Any) -> Any:
    """The first rank's value, which can be pickled, on all ranks of the default process group."""
    shared = [value]
    dist.broadcast_object_list(shared)
    return shared[0]


def is_first(mesh: DeviceMesh | None) -> bool:
    """Whether this is the mesh's first rank, the one that writes."""
    return dist.get_rank() == 0 if mesh is None else not any(mesh.get_coordinate() or ())
