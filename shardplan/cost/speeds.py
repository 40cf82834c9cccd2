"""The seconds that operations and collectives take at full speed."""

from __future__ import annotations

import math
from collections.abc import Mapping

from shardplan.core.estimates import Device, Traffic
from shardplan.core.mesh import APPLIED, Axis, MeshSizes


def sending(device: Device, sizes: MeshSizes, traffic: Traffic) -> tuple[float, float]:
    """The seconds on the links in a node, and on the network."""
    inside, crosses = placed(traffic.axis, sizes, device.node_gpus)
    links = traffic.bytes / device.node_bandwidth if inside > 1 else 0.0
    # The group's ranks in a node share the node's network.
    return links, traffic.bytes / inside / device.network_bandwidth if crosses else 0.0


def computing(device: Device, flops: Mapping[str, int]) -> float:
    """The seconds of operations at full speed.

    Raises:
        ValueError: the device file has no speed for a dtype of a computation.
    """
    for dtype in flops:
        if dtype not in device.flops:
            raise ValueError(f"device {device.name} has no flops for {dtype}, only for {', '.join(device.flops)}")
    return sum(n / device.flops[dtype] for dtype, n in flops.items())


def placed(axis: Axis, sizes: MeshSizes, node: int) -> tuple[int, bool]:
    """The number of ranks of an axis's group that are in one node, and whether it has ranks in other nodes."""
    if axis is Axis.EP:  # neighbouring ranks are in one group
        stride, size = 1, sizes.ep
    elif axis is Axis.DP_SHARD:  # parameters are gathered over dp_shard and cp together
        stride, size = sizes.of(Axis.TP), sizes.dp_shard * sizes.cp
    else:
        outer_first = (Axis.PP, *APPLIED)
        stride = math.prod(map(sizes.of, outer_first[outer_first.index(axis) + 1 :]))
        size = sizes.of(axis)
    inside = max(1, min(size, node // stride))
    return inside, inside < size
