"""What the first run of a checkpoint has read from the device, for its second run, which then does not wait for the device again."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


class ReadOnce:
    """The forward of one call of a checkpoint, which is run again in backward.

    Args:
        forward: it calls `once` as often in each run.
    """

    def __init__(self, forward: Callable[..., Any]):
        self.forward = forward
        self.kept: list[Any] = []
        self.place = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.place = 0
        token = _RUN.set(self)
        try:
            return self.forward(*args, **kwargs)
        finally:
            _RUN.reset(token)

    def next(self, read: Callable[[], T]) -> T:
        if self.place == len(self.kept):  # the first run, or one that goes on where an earlier one was stopped
            self.kept.append(read())
        self.place += 1
        return self.kept[self.place - 1]


_RUN: ContextVar[ReadOnce | None] = ContextVar("_RUN", default=None)  # the innermost checkpoint that runs


def once(read: Callable[[], T]) -> T:
    """What `read` returns; in a second run of a checkpoint what it returned at this place of the first."""
    run = _RUN.get()
    return read() if run is None else run.next(read)
