"""What each data-parallel backend does to a model. The facts about each are in `shardplan.styles.backends`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shardplan.core.sections import DataParallel

from .ddp import apply_ddp
from .fsdp2 import apply_fsdp2
from .megatron_fsdp import apply_megatron_fsdp, wrap_optimizer
from .wrapped import Wrapped


def unchanged(optimizer: Optimizer) -> Optimizer:
    """The same optimizer: any optimizer can update the parameters of these backends."""
    return optimizer


@dataclass(frozen=True, slots=True)
class Functions:
    """The functions of a backend.

    Args:
        model: (model, data-parallel mesh, section, names) -> the result of `apply_plan`: the model, or a wrapper around it.
        optimizer: adapts an optimizer to the wrapper; returns the same object.
    """

    model: Callable[[nn.Module, DeviceMesh, DataParallel, Wrapped], nn.Module]
    optimizer: Callable[[Optimizer], Optimizer] = unchanged


FUNCTIONS: dict[str, Functions] = {
    "fsdp2": Functions(apply_fsdp2),
    "megatron_fsdp": Functions(apply_megatron_fsdp, wrap_optimizer),
    "ddp": Functions(apply_ddp),
}
