"""The progress of loading or saving."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tqdm.auto import tqdm


@dataclass(frozen=True)
class Progress:
    """A report that one tensor is done.

    Args:
        name: the tensor's.
        done: bytes, on this rank, this tensor included.
        total: bytes, on this rank.
    """

    name: str
    done: int
    total: int


OnProgress = Callable[[Progress], None]


def reporter(progress: bool | OnProgress, first: bool) -> OnProgress:
    """The function to call after each tensor: the user's, or one that draws a bar on the first rank's terminal."""
    if callable(progress):
        return progress
    bar = tqdm(unit="B", unit_scale=True, disable=None if progress and first else True)

    def draw(now: Progress) -> None:
        bar.total = now.total
        bar.update(now.done - bar.n)
        if now.done == now.total:
            bar.close()

    return draw
