"""Mesh axes: their names, the other spellings in use, and sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
UNSUPPORTED = {"ep": "expert parallelism", "pp": "pipeline parallelism"}  # refused where they are larger than one

# Spellings of other projects -> ours. A spelling that covers several axes names the flattened ones.
AXIS_ALIASES: dict[str, str] = {
    "tensor_parallel": "tp",
    "tensor": "tp",
    "model": "tp",
    "context_parallel": "cp",
    "context": "cp",
    "data_parallel": "dp_shard",
    "data": "dp_shard",
    "dp": "dp_shard",
    "fsdp": "dp_shard",
    "shard": "dp_shard",
    "dp_shard_cp": "dp_shard",
    "dp_cp": "dp_shard",
    "hsdp": "dp_replicate",
    "replicate": "dp_replicate",
    "ddp": "dp_replicate",
    "pipeline_parallel": "pp",
    "expert_parallel": "ep",
}


def canonical_axis(name: str) -> str | None:
    """Our name of a mesh axis, or None where nobody calls an axis that."""
    return name if name in AXES else AXIS_ALIASES.get(name)


@dataclass(frozen=True, slots=True)
class MeshSizes:
    """The number of ranks on each axis. `tp` None means "not said": checks then hold for every size."""

    tp: int | None = None
    dp_shard: int = 1
    dp_replicate: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise ValueError(f"the size of mesh axis {axis} must be a positive integer, not {size!r}")

    @property
    def world_size(self) -> int:
        world = 1
        for axis in AXES:
            world *= getattr(self, axis) or 1
        return world


def named_sizes(mesh: Mapping[str, int]) -> MeshSizes:
    """The sizes of a mesh from axis names, in any of their spellings.

    Raises:
        ValueError: an axis that is none, two names of one axis, a size that is no positive integer.
    """
    given: dict[str, int] = {}
    for name, size in mesh.items():
        axis = canonical_axis(name)
        if axis is None:
            raise ValueError(f"there is no mesh axis {name!r}: the axes are {', '.join(AXES)}")
        if axis in given:
            raise ValueError(f"two sizes of the mesh mean {axis}")
        given[axis] = size
    return MeshSizes(**given)


def duplicate_axes(names: Iterable[str]) -> tuple[str, ...]:
    """The canonical axes that several of the given names stand for."""
    seen: set[str] = set()
    twice: list[str] = []
    for name in names:
        axis = canonical_axis(name)
        if axis in seen:
            twice.append(axis)
        elif axis is not None:
            seen.add(axis)
    return tuple(twice)
