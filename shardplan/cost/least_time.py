"""The least time of a step: each part of a device works at its full speed, and all that `overlap` does not name overlaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardplan.core.estimates import Bound, Device, Term, Traffic
from shardplan.core.mesh import MeshSizes

from .overlap import Overlap, computing, sending, waiting


def bound_of(
    device: Device,
    sizes: MeshSizes,
    flops: Mapping[str, int],
    traffic: Sequence[Traffic],
    touched: int,
    overlap: Overlap,
    pipeline: float | None = None,
) -> Bound:
    """The lower bound on a step's time.

    Args:
        pipeline: the seconds of the pipeline's schedule.

    Raises:
        ValueError: the device file has no speed for a dtype of a computation.
    """
    terms: dict[Term, float] = {
        "compute": computing(device, flops),
        "memory": touched / device.memory_bandwidth,
        "links in a node": 0.0,
        "network": 0.0,
    }
    for one in traffic:
        inside, outside = sending(device, sizes, one)
        terms["links in a node"] += inside
        terms["network"] += outside
    if pipeline is not None:
        terms["pipeline"] = pipeline
    return Bound(terms, waiting(device, sizes, traffic, overlap))
