"""All ranks continue, or all raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@contextmanager
def all_or_none(mesh: DeviceMesh | None, doing: str) -> Iterator[Callable[[object], None]]:
    """Do something on all ranks of a mesh, and check at its end that it succeeded on all.

    The context yields a function that accepts what must be equal on all ranks: picklable and comparable
    values.

    Args:
        mesh: whose ranks; None is all ranks of the default process group.
        doing: what is done, for messages.

    Raises:
        RuntimeError: it failed on another rank, which the message names with its error, or the values differ. The rank
            that failed raises its own error.
    """
    reported: list[object] = []
    failure: Exception | None = None
    try:
        yield reported.append
    except Exception as error:
        failure = error
    outcome = (dist.get_rank(), None if failure is None else f"{type(failure).__name__}: {failure}", reported)
    try:
        answers = _everyone(outcome, mesh)
    except Exception as error:  # a rank died; a failure on this rank is the cause, if there is one
        raise failure or error from error
    if failure is not None:
        raise failure
    failed = [(rank, text) for rank, text, _ in answers if text is not None]
    if failed:
        ranks = f"rank {failed[0][0]}" if len(failed) == 1 else f"ranks {', '.join(str(rank) for rank, _ in failed)}"
        raise RuntimeError(f"{doing} failed on {ranks}: {failed[0][1]}")
    different = [rank for rank, _, other in answers if other != answers[0][2]]
    if different:
        raise RuntimeError(
            f"{doing}: ranks {different} differ from rank {answers[0][0]}; all ranks need the same "
            "arguments and the same files"
        )


def _everyone(value: Any, mesh: DeviceMesh | None) -> list[Any]:
    """The value of each rank, in the same order on all."""
    values = [value]
    for group in [None] if mesh is None else [mesh.get_group(axis) for axis in range(mesh.ndim)]:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, values, group=group)
        values = [one for part in gathered for one in part]
    return values


def is_first(mesh: DeviceMesh | None) -> bool:
    """Whether this is the mesh's first rank, the one that writes."""
    return dist.get_rank() == 0 if mesh is None else not any(mesh.get_coordinate() or ())
