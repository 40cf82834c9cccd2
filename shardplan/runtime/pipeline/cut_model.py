"""A model as the caller has it -> the stages of this rank, each a module of its own."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardplan.core.stages import PipelineCut
from shardplan.core.tree import full_name
from shardplan.model.adapters import unwrapped
from shardplan.model.stage_stubs import Stage, stage_of


def cut_model(model: nn.Module, cut: PipelineCut, stages: Iterable[int]) -> list[tuple[nn.Module, Stage]]:
    """Copies of a model without its tensors, each made one stage of the cut. Parameters are not copied: a stage has the
    parameters that the model has. Buffers outside of what belongs to one stage are copied, as every stage has them.

    Args:
        model: as the caller has it; it is not changed.
        stages: those of this rank.
    """
    return [_one(model, cut, stage) for stage in stages]


def _one(model: nn.Module, cut: PipelineCut, stage: int) -> tuple[nn.Module, Stage]:
    inner = unwrapped(model)
    kept: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    kept |= {id(buffer): buffer for name, buffer in inner.named_buffers() if cut.stage_of(name) is not None}
    part = copy.deepcopy(model, kept)
    return part, stage_of(unwrapped(part), cut, stage)


@dataclass(frozen=True)
class Absent:
    """What other stages have.

    Args:
        modules: by name, as they were, without memory; none where they had some.
        tied: name there -> the name of this stage's copy of that parameter. Those before this stage's alone.
    """

    modules: Mapping[str, nn.Module]
    tied: Mapping[str, str]


def absent_of(model: nn.Module, cut: PipelineCut, stage: int) -> Absent:
    """What a stage does not have of a model, if that is on the meta device."""
    inner = unwrapped(model)
    modules = dict(inner.named_modules())
    found = {name: modules[name] for name in cut.absent_from(stage) if name in modules}
    on_meta = {name: one for name, one in found.items() if all(p.is_meta for p in one.parameters())}
    tied = {}
    for tie in cut.ties:
        own = [name for name in tie if cut.stage_of(name) == stage]
        if own and own[0] != tie[0]:
            tied[tie[0]] = own[0]
    return Absent(on_meta, tied)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers of a model by name, without memory."""
    return {
        full_name(prefix, leaf): torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for prefix, module in model.named_modules(remove_duplicate=False)
        for leaf, tensor in {**module._parameters, **module._buffers}.items()
        if tensor is not None and leaf not in module._non_persistent_buffers_set
    }


def empty(model: nn.Module) -> None:
    """Take everything out of a module, so that what no stage of this rank has is freed."""
    model._modules.clear()
    model._parameters.clear()
    model._buffers.clear()
