"""A pipeline's ranks tell each other of the first failure. Ranks that wait for the failed one cannot be interrupted: their
communication ends when its process ends, or when the process group times out. Then they can read the reason."""

from __future__ import annotations

from itertools import count
from weakref import WeakKeyDictionary

import torch.distributed as dist

from shardplan.torchlib.private import private

MOST = 500  # characters of a message
_default_store = private("default_store")
# By the group of all ranks, as ranks that are threads share this module but not their groups.
_numbers: WeakKeyDictionary[dist.ProcessGroup, count[int]] = WeakKeyDictionary()


class StepFailures:
    """A note about the first rank that failed, readable on all ranks. Make it on all ranks in the same order."""

    def __init__(self) -> None:
        assert dist.group.WORLD is not None
        self.key = f"shardplan pipeline {next(_numbers.setdefault(dist.group.WORLD, count()))}"

    def tell(self, error: Exception) -> str | None:
        """Leave a note, unless there is one. Returns another rank's note, if any."""
        own = f"rank {dist.get_rank()} failed first: {in_words(error)}"[:MOST]
        try:
            first = _default_store().compare_set(self.key, "", own).decode()
        except Exception:  # the rank that holds the store is gone: nothing to read
            return None
        return first if first not in ("", own) else None


def in_words(error: BaseException) -> str:
    """An exception as text; for torch's stage error ("failed to run forward", with all arguments), its cause."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
