"""The least time of a step: what each part of a device takes at its full speed, all of it overlapped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from shardplan.core.estimates import Bound, Device, Term, Traffic
from shardplan.core.mesh import APPLIED, Axis, MeshSizes


def bound_of(
    device: Device,
    sizes: MeshSizes,
    flops: Mapping[str, int],
    traffic: Iterable[Traffic],
    touched: int,
    pipeline: float | None = None,
) -> Bound:
    """The bound.

    Args:
        pipeline: seconds of the schedule of pipeline stages.

    Raises:
        ValueError: the device file has no speed for a dtype that is computed in.
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
    return Bound(terms)


def sending(device: Device, sizes: MeshSizes, traffic: Traffic) -> tuple[float, float]:
    """Seconds on the links in a node, and on the network."""
    inside, crosses = placed(traffic.axis, sizes, device.node_gpus)
    links = traffic.bytes / device.node_bandwidth if inside > 1 else 0.0
    # The group's ranks in a node share the way out of it.
    return links, traffic.bytes / inside / device.network_bandwidth if crosses else 0.0


def waiting(device: Device, sizes: MeshSizes, traffic: Iterable[Traffic]) -> float:
    """Seconds of collectives whose result the next operation reads: those over tp, cp and ep. What data-parallel ranks gather and
    reduce is under way while other layers run."""
    return sum(max(sending(device, sizes, one)) for one in traffic if one.axis in (Axis.TP, Axis.CP, Axis.EP))


def computing(device: Device, flops: Mapping[str, int]) -> float:
    """Seconds of operations at full speed.

    Raises:
        ValueError: the device file has no speed for a dtype that is computed in.
    """
    for dtype in flops:
        if dtype not in device.flops:
            raise ValueError(f"device {device.name} has no flops for {dtype}, only for {', '.join(device.flops)}")
    return sum(n / device.flops[dtype] for dtype, n in flops.items())


def placed(axis: Axis, sizes: MeshSizes, node: int) -> tuple[int, bool]:
    """How many ranks of a group of that axis are in one node, and whether the group has others."""
    if axis is Axis.EP:  # neighbouring ranks are of one group
        stride, size = 1, sizes.ep
    elif axis is Axis.DP_SHARD:  # parameters are gathered over it and cp together
        stride, size = sizes.of(Axis.TP), sizes.dp_shard * sizes.cp
    else:
        outer_first = (Axis.PP, *APPLIED)
        stride = math.prod(map(sizes.of, outer_first[outer_first.index(axis) + 1 :]))
        size = sizes.of(axis)
    inside = max(1, min(size, node // stride))
    return inside, inside < size
