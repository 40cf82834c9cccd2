"""The ep axis of a mesh: a view of its dp_shard x cp x tp, the innermost ranks of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from shardplan.core.mesh import VIEWED, Axis, MeshSizes
from shardplan.runtime.parallel.process_groups import flatten, unflatten

EP, EP_SHARD = "ep", "ep_shard"  # the names of the view's axes, as NeMo Automodel and torchtitan have them
LEADING = ("pp", "dp_replicate")  # axes that a moe_mesh may have before them
SHOWN = 4
# On a DeviceMesh, which hashes by value: two meshes with the same ranks may have different ep. Slices do not have them.
_SIZE = "_shardplan_ep"
_VIEWS = "_shardplan_expert_views"


def note_ep(mesh: DeviceMesh, ep: int) -> None:
    """Let `ep_of` know the size of ep that a mesh was made for."""
    setattr(mesh, _SIZE, ep)


def ep_of(mesh: DeviceMesh, ep: int | None, moe_mesh: DeviceMesh | None) -> int:
    """The size of the ep axis: as given, of the moe_mesh, as `build_mesh` noted it, or 1.

    Raises:
        TypeError: the moe_mesh is no DeviceMesh.
        ValueError: two of them differ; the axes of the moe_mesh are not (ep_shard, ep).
    """
    said: dict[str, int] = {}
    if ep is not None:
        said["the argument ep"] = ep
    if moe_mesh is not None:
        said["moe_mesh"] = _size_of(moe_mesh)
    if (noted := getattr(mesh, _SIZE, None)) is not None:
        said["the mesh that build_mesh made"] = noted
    if len(set(said.values())) > 1:
        text = ", ".join(f"{size} of {where}" for where, size in said.items())
        raise ValueError(f"the size of ep is given several times: {text}. Give one, or the same")
    return next(iter(said.values()), 1)


def _size_of(moe_mesh: DeviceMesh) -> int:
    if not isinstance(moe_mesh, DeviceMesh):
        raise TypeError(f"moe_mesh must be a torch DeviceMesh, not {type(moe_mesh).__name__}")
    names = tuple(moe_mesh.mesh_dim_names or ())
    if names[-2:] != (EP_SHARD, EP) or any(name not in LEADING for name in names[:-2]):
        raise ValueError(
            f"moe_mesh must have the axes ({EP_SHARD}, {EP}), with {' or '.join(LEADING)} before them at most, not {names}"
        )
    return moe_mesh.size(moe_mesh.ndim - 1)


def check_moe_mesh(mesh: DeviceMesh, moe_mesh: DeviceMesh, ep: int) -> None:
    """Raise ValueError where the ep groups of a moe_mesh are others than those of the view.

    Args:
        mesh: whose innermost axes are those that ep is taken from, and fit.
    """
    ours, theirs = (one.mesh.reshape(-1, ep).tolist() for one in (mesh, moe_mesh))
    if sorted(ours) != sorted(theirs):
        raise ValueError(
            f"the ep groups of moe_mesh are {_some([g for g in theirs if g not in ours] or theirs)}, but those of the mesh are "
            f"{_some([g for g in ours if g not in theirs] or ours)}: ep is taken from the innermost ranks of dp_shard x cp x "
            "tp. Pass ep instead of moe_mesh, or a moe_mesh with these groups"
        )


def _some(groups: list[list[int]]) -> str:
    more = len(groups) - SHOWN
    return ", ".join(map(str, groups[:SHOWN])) + (f" and {more} more" if more > 0 else "")


def expert_view(mesh: DeviceMesh, names: Mapping[Axis, str], sizes: MeshSizes) -> DeviceMesh:
    """[dp_replicate,] ep_shard, ep over the mesh's ranks, and a tp axis of size 1 where the mesh has none. Made once for a mesh,
    because it makes process groups: by all ranks at the same time."""
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
