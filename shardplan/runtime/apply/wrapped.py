"""The names that a data-parallel backend needs, besides the plan's section."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Wrapped:
    """Names in the model as the caller has it.

    Args:
        units: the modules that the plan gathers together, in the order of the model.
        parts: modules that are gathered on their own beside them.
        experts: modules of experts that are distributed over ep, gathered on their own too.
        experts_mesh: what these are sharded over: [dp_replicate,] ep_shard.
        ignored: parameters that are left alone.
        fused_heads: modules whose parameters a loss reads, behind their forward.
        mesh: the whole mesh.
        tp: the mesh's name of its tp axis, if it has one.
        joint: the process group of dp_replicate and dp_shard in one, where there are both.
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
