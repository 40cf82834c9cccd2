"""What overlaps in a step, for its least time.

A step waits for each collective over tp, cp and ep until it has the result. It computes in the meantime only what the traced run computes between
such a collective and its wait. Collectives of data-parallel ranks overlap with other layers, as FSDP2 gathers the next layer and reduces the last
one while another runs. Sends between stages overlap with other micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardplan.core.estimates import Device, Traffic
from shardplan.core.mesh import APPLIED, Axis, MeshSizes

WAITED = (Axis.TP, Axis.EP, Axis.CP)


@dataclass(frozen=True, slots=True)
class Overlap:
    """The products that run while collectives over tp, cp and ep are under way.

    Args:
        sent: (axis, collective) -> ring bytes of the collectives during which some product runs.
        products: dtype -> floating-point operations of these products, each counted once.
    """

    sent: Mapping[tuple[Axis, str], int] = field(default_factory=dict)
    products: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: Overlap) -> Overlap:
        return Overlap(_sum(self.sent, other.sent), _sum(self.products, other.products))

    def __mul__(self, times: int) -> Overlap:
        return Overlap(
            {key: size * times for key, size in self.sent.items()},
            {dtype: n * times for dtype, n in self.products.items()},
        )


ALONE = Overlap()  # the step computes nothing while its collectives are under way


def waiting(device: Device, sizes: MeshSizes, traffic: Iterable[Traffic], overlap: Overlap) -> float:
    """The seconds of collectives over tp, cp and ep during which nothing is computed."""
    all_of = sum(max(sending(device, sizes, one)) for one in traffic if one.axis in WAITED)
    under_way = sum(
        max(sending(device, sizes, Traffic(axis, name, 1, size))) for (axis, name), size in overlap.sent.items()
    )
    return all_of - min(under_way, computing(device, overlap.products))


def _sum(one: Mapping, other: Mapping) -> dict:
    return {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}


# The seconds that operations and collectives take at full speed.
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
