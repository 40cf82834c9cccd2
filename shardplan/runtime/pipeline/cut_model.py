"""From the caller's model to the stages of this rank, each a module of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardplan.core.stages import PipelineCut
from shardplan.core.tree import full_name
from shardplan.model.adapters import unwrapped
from shardplan.model.rebinding import NotBound, copied
from shardplan.model.stage_stubs import HOOKS, Stage, stage_of

CUT = "it was cut into pipeline stages: use the Pipeline that apply_plan returned"


def cut_model(model: nn.Module, cut: PipelineCut, stages: Iterable[int]) -> list[tuple[nn.Module, Stage]]:
    """Make copies of a model, each one stage of the cut. Parameters are not copied: a stage shares the model's. Buffers
    that belong to no single stage are copied, as every stage has them.

    Args:
        model: the caller's model; it is not changed.
        stages: the stages of this rank.

    Raises:
        ValueError: a function that was put on the model refers to a part of it that a copy does not have.
    """
    return [_one(model, cut, stage) for stage in stages]


def _one(model: nn.Module, cut: PipelineCut, stage: int) -> tuple[nn.Module, Stage]:
    inner = unwrapped(model)
    kept: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    kept |= {id(buffer): buffer for name, buffer in inner.named_buffers() if cut.stage_of(name) is not None}
    try:
        part = copied(model, kept, _put_there(model))
    except NotBound as error:
        raise ValueError(f"the model cannot be cut into pipeline stages: {error}") from error
    return part, stage_of(unwrapped(part), cut, stage)


def _put_there(model: nn.Module) -> dict[int, Any]:
    """The hooks and forwards that were put on the modules, by id. All copies of the model share them, so their owner finds what they collect."""
    names = [name for name in HOOKS if "forward" in name or "backward" in name]
    found = [hook for module in model.modules() for name in names for hook in vars(module)[name].values()]
    found += [vars(module)["forward"] for module in model.modules() if "forward" in vars(module)]
    return {id(one): one for one in found if callable(one) and not isinstance(one, nn.Module)}


@dataclass(frozen=True)
class Absent:
    """The parts of other stages.

    Args:
        modules: name -> module without memory; empty if the modules had memory.
        tied: name in an earlier stage -> the name of this stage's copy of that parameter.
    """

    modules: Mapping[str, nn.Module]
    tied: Mapping[str, str]


def absent_of(model: nn.Module, cut: PipelineCut, stage: int) -> Absent:
    """The parts of a model that a stage does not have, as far as they are on the meta device."""
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


def empty(model: nn.Module, kept: Iterable[nn.Module]) -> None:
    """Remove everything from a model: parts that belong to no stage of this rank are freed, and functions that refer to a module of the
    model can no longer compute with it.

    Args:
        kept: modules that stay as they are.
    """
    stay = {id(module) for one in kept for module in one.modules()}
    for module in [*model.modules()]:
        if id(module) not in stay:
            module._modules.clear()
            module._parameters.clear()
            module._buffers.clear()
            vars(module)["forward"] = _refused


def _refused(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(f"this model is unusable: {CUT}")
