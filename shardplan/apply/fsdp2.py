"""The data-parallel wrapping pass with FSDP2."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from shardplan.core.plan import DataParallel, MixedPrecision
from shardplan.torchlib.failures import at_module


def apply_fsdp2(model: nn.Module, mesh: DeviceMesh, section: DataParallel, units: Sequence[str]) -> nn.Module:
    """Shard the units, inner ones first, then the root, which keeps what no unit holds. Returns the same model.

    Args:
        mesh: [dp_replicate,] dp_shard.
        units: module names in the order of the model's forward.
    """
    options = {"mesh": mesh, "mp_policy": _policy(section.mixed_precision), "offload_policy": _offload(section)}
    modules = [model.get_submodule(name) for name in units]
    for name, module in sorted(zip(units, modules, strict=True), key=lambda unit: -unit[0].count(".")):
        with at_module(name):
            fully_shard(module, **options, reshard_after_forward=_reshard(section, module is modules[-1]))
    fully_shard(model, **options)
    _prefetch(modules, section)
    return model


def reshard(model: nn.Module) -> None:
    """Put the sharded parameters back: FSDP2 leaves gathered ones in their place after a forward without a backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _reshard(section: DataParallel, last: bool) -> bool | int:
    return not last if section.reshard_after_forward == "all_but_last" else section.reshard_after_forward


def _dtype(name: str | None) -> torch.dtype | None:
    return getattr(torch, name) if name else None


def _policy(section: MixedPrecision | None) -> MixedPrecisionPolicy:
    if section is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=_dtype(section.param),
        reduce_dtype=_dtype(section.reduce),
        output_dtype=_dtype(section.output),
        cast_forward_inputs=section.cast_forward_inputs,
    )


def _offload(section: DataParallel) -> OffloadPolicy:
    return CPUOffloadPolicy(pin_memory=section.cpu_offload == "pinned") if section.cpu_offload else OffloadPolicy()


def _prefetch(units: Sequence[nn.Module], section: DataParallel) -> None:
    for i, unit in enumerate(units):
        if section.forward_prefetch is not None:
            unit.set_modules_to_forward_prefetch(list(units[i + 1 : i + 1 + section.forward_prefetch]))
        if section.backward_prefetch is not None:
            before = units[max(0, i - section.backward_prefetch) : i]
            unit.set_modules_to_backward_prefetch(list(reversed(before)))
