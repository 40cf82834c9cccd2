"""Building meshes from the sizes that NeMo Automodel's releases take."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardplan import build_mesh
from shardplan.runtime.parallel.process_groups import flatten


def first_mesh(device: str, dp_size: int | None = None, tp_size: int | None = 1, cp_size: int | None = 1) -> DeviceMesh:
    """The mesh of NeMo Automodel's first release. It always has data_parallel, context_parallel and tensor_parallel, and with several
    context-parallel ranks the flattened dp_cp.

    Raises:
        ValueError: the sizes do not multiply to the number of ranks.
    """
    tp, cp = (size if size is not None and size > 0 else 1 for size in (tp_size, cp_size))
    ranks = dist.get_world_size()
    dp = dp_size if dp_size is not None and dp_size > 0 else ranks // (tp * cp)
    if dp * tp * cp != ranks:
        raise ValueError(f"dp_size {dp} x cp_size {cp} x tp_size {tp} is {dp * cp * tp}, but there are {ranks} ranks")
    mesh = init_device_mesh(
        device, (dp, cp, tp), mesh_dim_names=("data_parallel", "context_parallel", "tensor_parallel")
    )
    if cp > 1:
        flatten(mesh, ("data_parallel", "context_parallel"), "dp_cp")
    return mesh


def mesh_of_sizes(
    device: str | None,
    dp_size: int | None = None,
    dp_replicate_size: int | None = 1,
    tp_size: int | None = 1,
    cp_size: int | None = 1,
    pp_size: int | None = 1,
    ep_size: int | None = 1,
) -> DeviceMesh:
    """The mesh of NeMo Automodel's sizes. dp_size is dp_replicate x dp_shard; where it is left open, it is the ranks that the
    others leave. Other open sizes are 1.

    Raises:
        ValueError: the product of the sizes is not the number of ranks.
    """
    ones = {"dp_replicate": dp_replicate_size, "tp": tp_size, "cp": cp_size, "pp": pp_size, "ep": ep_size}
    sizes = {axis: size if size is not None and size > 0 else 1 for axis, size in ones.items()}
    shard = dp_size if dp_size is not None and dp_size > 0 else None
    if shard is not None:
        if shard % sizes["dp_replicate"]:
            raise ValueError(f"dp_size {shard} is not a multiple of dp_replicate_size {sizes['dp_replicate']}")
        shard //= sizes["dp_replicate"]
    return build_mesh(dp_shard=shard, **sizes, device_type=device)
