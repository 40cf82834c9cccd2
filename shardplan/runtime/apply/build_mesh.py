"""Making a mesh from sizes; one size may be inferred."""

from __future__ import annotations

from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardplan.core.mesh import APPLIED, Axis, MeshSizes

from .expert_mesh import note_ep

ALWAYS = (Axis.DP_SHARD, Axis.TP)  # axes that scripts read from a mesh


def build_mesh(
    *,
    dp_shard: int | None = None,
    tp: int | None = 1,
    dp_replicate: int | None = 1,
    cp: int | None = 1,
    ep: int | None = 1,
    pp: int | None = 1,
    device_type: str | None = None,
) -> DeviceMesh:
    """Make a mesh over all ranks, with the axes that plans are applied on: pp, dp_replicate, dp_shard, cp, tp, in this order.

    dp_shard and tp are always there, the other axes where they are larger than one. ep is not one of them: it is a view of the
    innermost ranks of dp_shard x cp x tp. The mesh carries its size to `apply_plan`; slices of the mesh do not.

    Args:
        dp_shard, tp, dp_replicate, cp, pp: the sizes; pp is the number of ranks for a pipeline's stages. At most one may
            be None (or 0, or negative): it becomes the world size divided by the others.
        ep: the number of ranks over which experts are distributed. It divides dp_shard x cp x tp; and it divides tp, or tp
            divides it.
        device_type: "cuda" or "cpu"; None follows the process group's backend.

    Raises:
        ValueError: no process group; several sizes to infer; the sizes do not multiply to the world size; ep does not fit.
        TypeError: a size is not a whole number.
    """
    if not dist.is_initialized():
        raise ValueError(
            "there is no process group: call torch.distributed.init_process_group() first, in processes that torchrun starts"
        )
    stages = {Axis.PP: 1 if pp is None else pp}  # never inferred: a number of stages is a choice
    given: dict[Axis, int | None] = {**stages, **dict(zip(APPLIED, (dp_replicate, dp_shard, cp, tp), strict=True))}
    sizes = _inferred(given, dist.get_world_size())
    _check_type(Axis.EP, ep)
    experts = max(ep or 1, 1)
    MeshSizes(**sizes, ep=experts).check_ep()
    axes = [axis for axis in (Axis.PP, *APPLIED) if axis in ALWAYS or sizes[axis] > 1]
    device = device_type or ("cuda" if "nccl" in dist.get_backend() and torch.cuda.is_available() else "cpu")
    mesh = init_device_mesh(
        device, tuple(sizes[axis] for axis in axes), mesh_dim_names=tuple(axis.value for axis in axes)
    )
    if experts > 1:
        note_ep(mesh, experts)
    return mesh


def _check_type(axis: Axis, size: object) -> None:
    if not (size is None or (isinstance(size, int) and not isinstance(size, bool))):
        raise TypeError(f"the size of {axis} must be a whole number or None, not {size!r}")


def _inferred(given: dict[Axis, int | None], world: int) -> dict[Axis, int]:
    for axis, size in given.items():
        _check_type(axis, size)
    declared = {axis: size for axis, size in given.items() if size is not None and size > 0}
    free = [axis for axis in given if axis not in declared]
    if len(free) > 1:
        raise ValueError(
            f"the sizes of {' and '.join(free)} are not given: only one can be inferred from the world size"
        )
    known = prod(declared.values())
    text = " x ".join(f"{axis} {size}" for axis, size in declared.items())
    if free and world % known:
        raise ValueError(f"{free[0]} cannot be inferred: {text} = {known} does not divide the world size {world}")
    if not free and known != world:
        raise ValueError(f"{text} = {known}, but the world size is {world}: pass None for one size to infer it")
    return {axis: declared.get(axis, world // known) for axis in given}
