"""The data-parallel wrapping pass with DistributedDataParallel: whole models and averaged gradients."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from shardplan.core.sections import DDP, DataParallel

from .wrapped import Wrapped


def apply_ddp(model: nn.Module, mesh: DeviceMesh, section: DataParallel, wrapped: Wrapped) -> nn.Module:
    """Wrap the model; the wrapper's names begin with `module.`.

    Args:
        mesh: dp_replicate.
        wrapped: not used: DDP has buckets, not units.
    """
    defaults = DDP().values  # torch's own; passing one can warn
    changed = {name: value for name, value in (section.ddp or DDP()).values.items() if value != defaults[name]}
    return DistributedDataParallel(model, process_group=mesh.get_group(), **changed)
