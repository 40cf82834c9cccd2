"""All ranks go on, or none does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@contextmanager
def all_or_none(mesh: DeviceMesh | None, doing: str) -> Iterator[Callable[[object], None]]:
    """Do something on all ranks of a mesh, and learn at its end whether it went well on all.

    The context yields a function to be told what must be the same on all ranks, as something picklable that can be
    compared.

    Args:
        mesh: whose ranks; None is all ranks of the default process group.
        doing: what is done, for messages.

    Raises:
        RuntimeError: it failed on another rank, which is named with its error, or ranks told different things. The rank
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
    except Exception as error:  # a rank died; what failed here is why, if something did
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
            f"{doing}: ranks {different} see something else than rank {answers[0][0]}; all must be given the same "
            "arguments, and see the same files"
        )


def _everyone(value: Any, mesh: DeviceMesh | None) -> list[Any]:
    """What each rank gives, in the same order on all."""
    values = [value]
    for group in [None] if mesh is None else [mesh.get_group(axis) for axis in range(mesh.ndim)]:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, values, group=group)
        values = [one for part in gathered for one in part]
    return values


def is_first(mesh: DeviceMesh | None) -> bool:
    """Whether this is the mesh's first rank, the one that writes."""
    return dist.get_rank() == 0 if mesh is None else not any(mesh.get_coordinate() or ())
