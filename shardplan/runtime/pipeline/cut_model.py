"""A model as the caller has it -> the stages of this rank, each a module of its own."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn

from shardplan.core.stages import PipelineCut
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


def empty(model: nn.Module) -> None:
    """Take everything out of a module, so that what no stage of this rank has is freed."""
    model._modules.clear()
    model._parameters.clear()
    model._buffers.clear()
