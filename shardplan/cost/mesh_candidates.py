"""Every mesh for a number of devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardplan.core.estimates import Estimate
from shardplan.core.mesh import MeshSizes
from shardplan.core.size_bounds import MOST_RANKS, check_count


def meshes_of(
    gpus: int, ep: Sequence[int] = (1,), pp: Sequence[int] = (1,), cp: Sequence[int] = (1,)
) -> tuple[MeshSizes, ...]:
    """Each way to write a number as pp x dp_replicate x dp_shard x cp x tp, the smallest tp first, with each ep that fits it. Of pp
    and cp one is 1.

    Args:
        pp, cp: the sizes of that axis.

    Raises:
        ValueError: no positive integer; an ep that no mesh has, a pp or cp that does not divide it.
    """
    check_count("the number of devices", gpus, MOST_RANKS)
    for name, given in (("pp", pp), ("cp", cp)):
        for one in given:
            check_count(f"the size of mesh axis {name}", one, MOST_RANKS)
            if gpus % one:
                raise ValueError(f"{name} {one} does not divide {gpus} devices")
    every = (
        MeshSizes(tp=tp, dp_shard=shards, dp_replicate=rest // tp // shards, cp=chunks, ep=size, pp=stages)
        for stages in pp
        for chunks in (cp if stages == 1 else (1,))
        for rest in (gpus // stages // chunks,)
        for tp in _divisors(rest)
        for shards in reversed(_divisors(rest // tp))
        for size in ep
    )
    meshes = tuple(mesh for mesh in every if mesh.ep_misfit is None)
    for size in ep:
        if not any(mesh.ep == size for mesh in meshes):
            raise ValueError(f"no mesh of {gpus} devices has ep {size}")
    return meshes


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def in_order(estimates: Iterable[Estimate]) -> tuple[Estimate, ...]:
    """Those that fit first, by the bound of their speed; the others by memory."""

    def key(one: Estimate) -> tuple[bool, float, int]:
        return (not one.fits, -(one.tokens_per_second or 0.0) if one.fits else 0.0, one.memory.total)

    return tuple(sorted(estimates, key=key))
