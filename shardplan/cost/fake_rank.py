"""One rank of a process group of any size, in a single process, and tensors without memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional
from transformers import masking_utils

from shardplan.core.mesh import APPLIED, Axis, MeshSizes
from shardplan.runtime.apply.plan_mesh import PlanMesh, read_mesh
from shardplan.styles.backends import Backend
from shardplan.torchlib.fakes import FakeTensors
from shardplan.torchlib.operators import FUSED_ATTENTION
from shardplan.torchlib.private import private

_serial = count()
_attention = functional.scaled_dot_product_attention


@contextmanager
def fake_mesh(sizes: MeshSizes) -> Iterator[PlanMesh]:
    """A context with the mesh of one rank, whose collectives move nothing. It is the first rank, but over cp the last,
    which computes the most.

    The axes have names that no other mesh has. DTensor caches results of operators, with their mesh, for all equal meshes,
    and would return a mesh whose process groups are gone.

    Raises:
        ValueError: a process group is already initialised.
    """
    if dist.is_initialized():
        raise ValueError("an estimate needs its own process group: run it before init_process_group")
    private("fake_pg")
    shape = {axis.value: sizes.of(axis) for axis in APPLIED}
    for axis in ("dp_replicate", "cp"):
        if shape[axis] == 1:  # FSDP2 uses hybrid sharding for an axis of one rank
            del shape[axis]
    serial = next(_serial)
    names = {axis: f"{axis}_{serial}" for axis in shape}
    rank = (sizes.cp - 1) * sizes.of(Axis.TP)
    with patch.object(
        sys, "excepthook", sys.excepthook
    ):  # init_process_group has a hook that begins lines with "[rank0]:"
        dist.init_process_group("fake", rank=rank, world_size=sizes.world_size)
        try:
            mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(names.values()))
            yield read_mesh(mesh, names, sizes.ep)
        finally:
            dist.destroy_process_group()


def groups_of(
    mesh: PlanMesh, backend: Backend | None, neighbours: Mapping[int, DeviceMesh]
) -> Mapping[str, tuple[Axis, int]]:
    """The name of each process group -> its axis and its number of ranks.

    Args:
        backend: the backend that wraps the model over the data-parallel axes.
        neighbours: the number of tp ranks with the same key-value heads -> their process group.
    """
    found: dict[str, tuple[Axis, int]] = {}
    for copies, one in neighbours.items():
        found[one.get_group().group_name] = Axis.TP, copies
    for axis, name in mesh.names.items():
        found[mesh.mesh.get_group(name).group_name] = axis, mesh.mesh[name].size()
    if backend is not None and (whole := mesh.data_parallel(backend)) is not None:  # over dp_shard and cp
        gathering = whole if whole.ndim == 1 else whole[(whole.mesh_dim_names or ())[-1]]
        found[gathering.get_group().group_name] = Axis.DP_SHARD, gathering.size()
    for axis, one in mesh.expert_axes.items():
        found[one.get_group().group_name] = axis, one.size()
    return found


@contextmanager
def without_memory() -> Iterator[None]:
    """Within this context, tensors are made with shapes but without values."""
    private("fake_collectives")
    with (
        FakeTensors(allow_non_fake_inputs=True),
        # The function reads values: ascending positions mean that nothing is packed.
        patch.object(masking_utils, "find_packed_sequence_indices", lambda position_ids: None),
        patch.object(functional, "scaled_dot_product_attention", _fused),
    ):
        yield


def _fused(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
    """Attention, fused where it is so on a device. The CPU has no fused kernel for values that are not as wide as keys, as in latent attention,
    and would make the scores of all pairs in float32."""
    names = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = {**dict(zip(names, args, strict=False)), **options}
    if v.shape[-1] == k.shape[-1] or q.ndim != 4 or q.shape[1] != v.shape[1] or given.get("attn_mask") is not None:
        return _attention(q, k, v, *args, **options)
    dropout, causal = given.get("dropout_p", 0.0), given.get("is_causal", False)
    return FUSED_ATTENTION(q, k, v, None, q.requires_grad, dropout, causal, scale=given.get("scale"))[0]
