"""One rank of a process group of any size, in this process alone, and tensors without memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import masking_utils

from shardplan.core.mesh import MeshSizes
from shardplan.torchlib.private import private

AXES = ("dp_replicate", "dp_shard", "tp")


@contextmanager
def fake_mesh(sizes: MeshSizes) -> Iterator[DeviceMesh]:
    """The mesh of rank 0, whose collectives move nothing, while the context lasts.

    Raises:
        ValueError: a process group is initialised already.
    """
    if dist.is_initialized():
        raise ValueError("an estimate needs a process group of its own: make it before init_process_group")
    private("fake_pg")
    shape = {axis: getattr(sizes, axis) or 1 for axis in AXES}
    if shape["dp_replicate"] == 1:  # FSDP2 takes an axis of one rank for hybrid sharding
        del shape["dp_replicate"]
    dist.init_process_group("fake", rank=0, world_size=sizes.world_size)
    try:
        yield init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    finally:
        dist.destroy_process_group()


def groups_of(mesh: DeviceMesh) -> Mapping[str, tuple[str, int]]:
    """The name of each axis' process group -> the axis and its number of ranks."""
    return {mesh.get_group(axis).group_name: (axis, mesh[axis].size()) for axis in mesh.mesh_dim_names}


@contextmanager
def without_memory() -> Iterator[None]:
    """Tensors that are made inside have shapes and no values."""
    private("fake_collectives")
    with (
        private("FakeTensorMode")(allow_non_fake_inputs=True),
        # It looks at values; of positions in ascending order it finds that nothing is packed.
        patch.object(masking_utils, "find_packed_sequence_indices", lambda position_ids: None),
    ):
        yield
