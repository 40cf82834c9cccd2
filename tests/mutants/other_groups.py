"""The group of another axis, in the place of a group or a mesh."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

used: list[bool] = []  # whether `another_group` had another one


def another_group(value: Any) -> Any:
    """A group of as many ranks that lie otherwise, as those of another axis do; of this rank alone where all ranks are in the group.
    What is no group, or has one rank, is given back."""
    if isinstance(value, DeviceMesh) and value.ndim == 1 and value.size() > 1:
        used.append(True)
        members = _others(value.mesh.tolist())
        group = dist.new_group(members, use_local_synchronization=True)
        return DeviceMesh.from_group(group, value.device_type, members, mesh_dim_names=value.mesh_dim_names)
    if isinstance(value, ProcessGroup) and value.size() > 1:
        used.append(True)
        return dist.new_group(_others(dist.get_process_group_ranks(value)), use_local_synchronization=True)
    return value


def _others(members: list[int]) -> list[int]:
    size, world, rank = len(members), dist.get_world_size(), dist.get_rank()
    if size == world:
        return [rank]
    step = members[1] - members[0]
    other = size if step == 1 else 1
    if size * other > world or other == step:
        return [rank]
    first = rank // (size * other) * size * other + rank % other
    return [first + i * other for i in range(size)]
