"""The names that a data-parallel backend needs in addition to the plan's section."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Wrapped:
    """Names in the caller's model.

    Args:
        units: the modules that the plan gathers as units, in the order of the model.
        parts: further modules that are gathered separately.
        experts: modules of experts that are distributed over ep, also gathered separately.
        experts_mesh: the mesh that shards these: [dp_replicate,] ep_shard.
        ignored: parameters that are left alone.
        fused_heads: modules whose parameters a loss reads after their forward.
        mesh: the whole mesh.
        tp: the mesh's name of its tp axis, if any.
        joint: one process group of dp_replicate and dp_shard, where there are both.
    """

    units: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    experts_mesh: DeviceMesh | None = None
    mesh: DeviceMesh | None = None
    tp: str | None = None
    joint: ProcessGroup | None = None
    fused_heads: tuple[str, ...] = ()
