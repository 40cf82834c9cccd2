"""Functions of a DeviceMesh without a public name."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

Group = DeviceMesh | ProcessGroup  # what a collective runs over; a mesh has one dimension


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that a slice was taken of; the mesh itself where it is none."""
    return mesh._get_root_mesh()


def flatten(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """Make several axes of a mesh available as one, under a new name. Returns that axis.

    `DeviceMesh._flatten` is what torchtitan calls for dp_shard x cp (torch 2.11 to 2.13 have no public spelling).
    """
    return mesh[axes]._flatten(name)


def unflatten(mesh: DeviceMesh, sizes: Mapping[str, int]) -> DeviceMesh:
    """A one-dimensional mesh as one of several axes, the outermost first. Makes process groups.

    `DeviceMesh._unflatten` is what torchtitan calls for the axes of experts (torch 2.11 to 2.13 have no public spelling).
    """
    return mesh._unflatten(0, tuple(sizes.values()), tuple(sizes))
