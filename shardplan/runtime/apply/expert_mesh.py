"""The ep axis of a mesh: a view of the innermost ranks of dp_shard x cp x tp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from shardplan.core.mesh import VIEWED, Axis, MeshSizes
from shardplan.runtime.parallel.process_groups import flatten, unflatten

EP, EP_SHARD = "ep", "ep_shard"  # the names of the view's axes, as in NeMo Automodel and torchtitan
# Attributes of a DeviceMesh object, not keys of a dict: meshes with the same ranks hash alike, but may differ in ep. Slices lack them.
_SIZE = "_shardplan_ep"
_VIEWS = "_shardplan_expert_views"


def note_ep(mesh: DeviceMesh, ep: int) -> None:
    """Tell `ep_of` the size of ep that a mesh was made for."""
    setattr(mesh, _SIZE, ep)


def ep_of(mesh: DeviceMesh, ep: int | None) -> int:
    """The size of the ep axis: as given, as `build_mesh` noted it, or 1.

    Raises:
        ValueError: both are given, and they differ.
    """
    noted = getattr(mesh, _SIZE, None)
    if ep is not None and noted not in (None, ep):
        raise ValueError(
            f"the argument ep is {ep}, but build_mesh made the mesh for ep {noted}: leave the argument out"
        )
    return ep if ep is not None else noted or 1


def expert_view(mesh: DeviceMesh, names: Mapping[Axis, str], sizes: MeshSizes) -> DeviceMesh:
    """[dp_replicate,] ep_shard, ep over the mesh's ranks, and a tp axis of size 1 where the mesh has none. Made once for a mesh,
    by all ranks at the same time, because it makes process groups."""
    views: dict[Any, DeviceMesh] = mesh.__dict__.setdefault(_VIEWS, {})
    axes = tuple(names[axis] for axis in (Axis.DP_REPLICATE, *VIEWED) if axis in names)
    key = (axes, sizes.ep)
    if key not in views:
        parts = {EP_SHARD: sizes.ep_shard, EP: sizes.ep}
        if Axis.DP_REPLICATE in names:
            parts = {names[Axis.DP_REPLICATE]: sizes.dp_replicate, **parts}
        if Axis.TP not in names:
            parts[Axis.TP.value] = 1
        views[key] = unflatten(flatten(mesh, axes, "_".join(axes)), parts)
    return views[key]
