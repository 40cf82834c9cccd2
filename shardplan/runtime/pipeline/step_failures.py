"""What the ranks of a pipeline tell each other where one of them fails. Those that wait for it cannot be called back: their
communication ends when its process does, or at the time-out of the process group. By then they can read why."""

from __future__ import annotations

from itertools import count
from weakref import WeakKeyDictionary

import torch.distributed as dist

from shardplan.torchlib.private import private

MOST = 500  # characters of a message
_default_store = private("default_store")
# By the group of all ranks, which is another for each rank that is a thread.
_numbers: WeakKeyDictionary[dist.ProcessGroup, count[int]] = WeakKeyDictionary()


class StepFailures:
    """A note that all ranks can read, of the first one that failed. To be made on all ranks in the same order."""

    def __init__(self) -> None:
        assert dist.group.WORLD is not None
        self.key = f"shardplan pipeline {next(_numbers.setdefault(dist.group.WORLD, count()))}"

    def tell(self, error: Exception) -> str | None:
        """Leave a note, unless there is one. What another rank has left, in words."""
        own = f"rank {dist.get_rank()} failed first: {in_words(error)}"[:MOST]
        try:
            first = _default_store().compare_set(self.key, "", own).decode()
        except Exception:  # the rank that holds the store is gone: there is nothing to read
            return None
        return first if first not in ("", own) else None


def in_words(error: BaseException) -> str:
    """An exception, or the one that torch's stage ("failed to run forward", with all arguments) was raised from."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
