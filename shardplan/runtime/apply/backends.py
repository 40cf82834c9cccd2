"""What each data-parallel backend does to a model. The facts about each are in `shardplan.styles.backends`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardplan.core.sections import DDP, DataParallel, MegatronFSDP

from .fsdp2 import apply_fsdp2
from .wrapped import Wrapped

# The data-parallel wrapping pass with Megatron-FSDP (the package megatron-fsdp, 0.6).

# Our names for arguments that the package names differently, or has in its policy of dtypes.
RENAMED = {"check_for_nan_in_grad": "report_nan_in_param_grad"}
DTYPES = ("grad_reduce_in_fp32", "preserve_fp32_weights")


def apply_megatron_fsdp(model: nn.Module, mesh: DeviceMesh, section: DataParallel, wrapped: Wrapped) -> nn.Module:
    """Wrap the model; the wrapper's names begin with `module.`.

    Args:
        mesh: [dp_replicate,] dp_shard, of CUDA devices.
    """
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model

    policy = MixedPrecisionPolicy(**dtypes(section.megatron_fsdp or MegatronFSDP()))
    return fully_shard_model(model, mixed_precision_policy=policy, **arguments(model, mesh, section, wrapped))


def arguments(model: nn.Module, mesh: Any, section: DataParallel, wrapped: Wrapped) -> dict[str, Any]:
    """The keyword arguments of `fully_shard_model`, without its policy of dtypes."""
    options = section.megatron_fsdp or MegatronFSDP()
    named = {RENAMED.get(name, name): value for name, value in options.values.items() if name not in DTYPES}
    if named["init_model_with_meta_device"] is None:
        named["init_model_with_meta_device"] = any(p.is_meta for p in model.parameters())
    *outer, shard = mesh.mesh_dim_names
    axes: dict[str, Any] = {"device_mesh": wrapped.mesh, "dp_shard_dim": shard, "tp_dim": wrapped.tp}
    if outer:
        axes |= {"dp_outer_dim": outer[0], "hybrid_fsdp_group": wrapped.joint}
    return {**axes, "fsdp_unit_modules": unit_classes(model, wrapped.units), **named}


def unit_classes(model: nn.Module, units: tuple[str, ...]) -> list[type[nn.Module]]:
    """The current classes of the plan's units, each once: the package finds units by class."""
    return list(dict.fromkeys(type(model.get_submodule(name)) for name in units))


def dtypes(options: MegatronFSDP) -> dict[str, torch.dtype | None]:
    """The arguments of the package's policy of dtypes."""
    return {
        "main_params_dtype": torch.float32 if options.preserve_fp32_weights else None,
        "main_grads_dtype": torch.float32 if options.grad_reduce_in_fp32 else None,
    }


def wrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """Make the optimizer's `step` and `zero_grad` work with the wrapper. Returns the same optimizer."""
    from megatron_fsdp import fully_shard_optimizer

    return fully_shard_optimizer(optimizer)


# The data-parallel wrapping pass with DistributedDataParallel: whole models and averaged gradients.
def apply_ddp(model: nn.Module, mesh: DeviceMesh, section: DataParallel, wrapped: Wrapped) -> nn.Module:
    """Wrap the model; the wrapper's names begin with `module.`.

    Args:
        mesh: dp_replicate.
        wrapped: not used: DDP has buckets, not units.
    """
    defaults = DDP().values  # torch's own; passing one can warn
    changed = {name: value for name, value in (section.ddp or DDP()).values.items() if value != defaults[name]}
    return DistributedDataParallel(model, process_group=mesh.get_group(), **changed)


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
