"""Mesh axes: their names, the other spellings in use, and sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from .size_bounds import MOST_RANKS, check_count


class Axis(StrEnum):
    """The axes of a mesh, the outermost first."""

    PP = "pp"
    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    CP = "cp"
    EP = "ep"
    TP = "tp"


AXES = tuple(Axis)
BATCHES = (Axis.DP_REPLICATE, Axis.DP_SHARD)  # axes whose ranks have batches of their own
DATA_PARALLEL = (*BATCHES, Axis.CP)  # or other tokens of one batch
APPLIED = (*DATA_PARALLEL, Axis.TP)  # axes over which models are sharded
_OF_THE_WORLD = tuple(axis for axis in AXES if axis is not Axis.EP)
VIEWED = (Axis.DP_SHARD, Axis.CP, Axis.TP)  # axes from whose ranks the ep axis is taken

# Spellings of other projects -> ours. One that covers several axes names the flattened ones.
AXIS_ALIASES: dict[str, Axis] = {
    "tensor_parallel": Axis.TP,
    "tensor": Axis.TP,
    "model": Axis.TP,
    "context_parallel": Axis.CP,
    "context": Axis.CP,
    "data_parallel": Axis.DP_SHARD,
    "data": Axis.DP_SHARD,
    "dp": Axis.DP_SHARD,
    "fsdp": Axis.DP_SHARD,
    "shard": Axis.DP_SHARD,
    "dp_shard_cp": Axis.DP_SHARD,
    "dp_cp": Axis.DP_SHARD,
    "hsdp": Axis.DP_REPLICATE,
    "replicate": Axis.DP_REPLICATE,
    "ddp": Axis.DP_REPLICATE,
    "pipeline_parallel": Axis.PP,
    "expert_parallel": Axis.EP,
}


def canonical_axis(name: str) -> Axis | None:
    """The mesh axis of that name, or None if there is none."""
    return Axis(name) if name in AXES else AXIS_ALIASES.get(name)


@dataclass(frozen=True, slots=True)
class MeshSizes:
    """The number of ranks on each axis. `tp` None means that no size is given.

    `ep` is a view of dp_shard x cp x tp, of their innermost ranks: it takes no ranks of its own.

    Args:
        shards: the number of axes of a DeviceMesh that split parameters (dp_shard, cp): with one, a backend wraps the
            model even over one rank. Other meshes have only sizes, and an axis of one rank does not count.

    Raises:
        ValueError: a size that is not a positive integer, or that is too large for any mesh.
    """

    tp: int | None = None
    dp_shard: int = 1
    dp_replicate: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    shards: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if size is not None or axis is not Axis.TP:
                check_count(f"the size of mesh axis {axis}", size, MOST_RANKS)

    def of(self, axis: Axis) -> int:
        """The number of ranks on an axis; 1 if `tp` is None."""
        return getattr(self, axis) or 1

    def text(self, axes: Iterable[Axis] = APPLIED, joined: str = " x ") -> str:
        """ "dp_shard 64 x tp 8": the axes of more than one rank; "" if there are none."""
        return joined.join(f"{axis} {self.of(axis)}" for axis in axes if self.of(axis) > 1)

    @property
    def shown(self) -> str:
        """ "dp_shard 4, ep 2, tp 2": every axis of more than one rank; "tp 1" if there are none."""
        return self.text(AXES, ", ") or f"{Axis.TP} 1"

    @property
    def replicas(self) -> int:
        """The number of ranks that have batches of their own."""
        return math.prod(map(self.of, BATCHES))

    @property
    def data_parallel_ranks(self) -> int:
        """The number of ranks over which gradients are averaged."""
        return math.prod(map(self.of, DATA_PARALLEL))

    @property
    def world_size(self) -> int:
        return math.prod(map(self.of, _OF_THE_WORLD))

    @property
    def splits_layers(self) -> bool:
        """Whether there is more than data parallelism; without a size of tp, tp counts as above 1."""
        return self.tp != 1 or self.ep > 1 or self.pp > 1

    @property
    def needs_rules(self) -> bool:
        """Whether a plan for data parallelism alone is insufficient: layers or sequences are split."""
        return self.splits_layers or self.cp > 1

    @property
    def viewed(self) -> int:
        """The number of ranks from which the ep axis is taken."""
        return math.prod(map(self.of, VIEWED))

    @property
    def ep_shard(self) -> int:
        """The number of ranks over which FSDP2 shards the experts of one ep rank, if ep fits."""
        assert self.ep_misfit is None, self.ep_misfit
        return self.viewed // self.ep

    @property
    def expert_share(self) -> float:
        """The factor for the gradients of experts where the parameters are read.

        All gradients are divided by dp_replicate x dp_shard x cp. Those of experts are sums over the ep axis, and are
        averaged over dp_replicate x ep_shard; this is the remaining factor.
        """
        return self.of(Axis.TP) / self.ep

    @property
    def ep_misfit(self) -> str | None:
        """Why the ep axis cannot be taken from the others; None if it can. It must divide the product of their sizes,
        and one of ep and tp must divide the other."""
        if self.viewed % self.ep:
            return f"ep {self.ep} does not divide {' x '.join(VIEWED)} = {self.viewed}"
        tp = self.of(Axis.TP)
        if tp % self.ep and self.ep % tp:
            return f"neither of ep {self.ep} and tp {tp} divides the other: ep groups would cut tp groups apart"
        return None

    def check_world(self) -> None:
        """Raise ValueError if no machine has as many ranks."""
        if self.world_size > MOST_RANKS:
            raise ValueError(
                f"{self.text(_OF_THE_WORLD)} are {self.world_size:,} ranks: a mesh has at most {MOST_RANKS:,}"
            )

    def check_ep(self) -> None:
        """Raise ValueError if the ep axis cannot be taken from the others."""
        if (why := self.ep_misfit) is not None:
            raise ValueError(why)


def named_sizes(mesh: Mapping[str, int]) -> MeshSizes:
    """The sizes of a mesh from axis names, in any of their spellings.

    Raises:
        ValueError: an unknown axis, two names of one axis, a size that is no positive integer or too large for a mesh.
    """
    given: dict[Axis, int] = {}
    for name, size in mesh.items():
        axis = canonical_axis(name)
        if axis is None:
            raise ValueError(f"there is no mesh axis {name!r}: the axes are {', '.join(AXES)}")
        if axis in given:
            raise ValueError(f"two sizes of the mesh mean {axis}")
        given[axis] = size
    sizes = MeshSizes(**given)
    sizes.check_world()
    return sizes


def duplicate_axes(names: Iterable[str]) -> tuple[str, ...]:
    """The canonical axes to which several of the given names refer."""
    seen: set[str] = set()
    twice: list[str] = []
    for name in names:
        axis = canonical_axis(name)
        if axis in seen:
            twice.append(axis)
        elif axis is not None:
            seen.add(axis)
    return tuple(twice)
