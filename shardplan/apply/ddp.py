"""The data-parallel wrapping pass with DistributedDataParallel: whole models, averaged gradients."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from shardplan.core.plan import DataParallel


def apply_ddp(model: nn.Module, mesh: DeviceMesh, section: DataParallel, units: Sequence[str]) -> nn.Module:
    """Wrap the model; the wrapper's names begin with `module.`.

    Args:
        mesh: dp_replicate.
        units: not used: DDP has buckets, not units.
    """
    return DistributedDataParallel(model, process_group=mesh.get_group())
