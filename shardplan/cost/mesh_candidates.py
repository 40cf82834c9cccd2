"""The meshes for a number of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardplan.core.mesh import Axis, MeshSizes, canonical_axis, named_sizes
from shardplan.core.size_bounds import MOST_RANKS, check_count


def meshes_of(
    gpus: int, ep: Sequence[int] = (1,), pp: Sequence[int] = (1,), cp: Sequence[int] = (1,)
) -> tuple[MeshSizes, ...]:
    """Each way to write a number as pp x dp_replicate x dp_shard x cp x tp, smallest tp first, with each ep that fits.
    At least one of pp and cp is 1.

    Args:
        pp, cp: the allowed sizes of these axes.

    Raises:
        ValueError: not a positive integer; an ep that fits no mesh; a pp or cp that does not divide the number.
    """
    check_count("the number of devices", gpus, MOST_RANKS)
    for name, given in (("pp", pp), ("cp", cp)):
        for one in given:
            check_count(f"the size of mesh axis {name}", one, MOST_RANKS)
            if gpus % one:
                raise ValueError(f"{name} {one} does not divide {gpus} devices")
    every = (
        MeshSizes(tp=tp, dp_shard=shards, dp_replicate=rest // tp // shards, cp=slices, ep=size, pp=stages)
        for stages in pp
        for slices in (cp if stages == 1 else (1,))
        for rest in (gpus // stages // slices,)
        for tp in _divisors(rest)
        for shards in reversed(_divisors(rest // tp))
        for size in ep
    )
    meshes = tuple(mesh for mesh in every if mesh.ep_misfit is None)
    for size in ep:
        if not any(mesh.ep == size for mesh in meshes):
            raise ValueError(f"no mesh of {gpus} devices has ep {size}")
    return meshes


def axes_of(mesh: Mapping[str, int | Sequence[int]], gpus: int) -> dict[Axis, tuple[int, ...]]:
    """The sizes by axis, given in any known spelling and form.

    Raises:
        ValueError: an unknown axis; two names for one axis; a size that does not fit the number of devices.
    """
    given: dict[Axis, tuple[int, ...]] = {}
    for name, sizes in mesh.items():
        every = (sizes,) if isinstance(sizes, int) else tuple(sizes)
        for size in every:
            named_sizes({name: size})
        axis = canonical_axis(name)
        if axis is None or axis in given or not every:
            raise ValueError(f"two names of one mesh axis, or no size of it: {name}")
        if misfits := [size for size in every if gpus % size]:
            raise ValueError(f"{axis} {misfits[0]} does not divide {gpus} devices")
        given[axis] = every
    return given


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
