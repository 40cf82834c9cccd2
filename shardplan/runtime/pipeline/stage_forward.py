"""The forward of a part: what it received, through the model's own forward, to what it sends or to the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Never

import torch
from torch import Tensor, nn

from shardplan.model.stage_stubs import Stage

from .step_loss import StepLoss


@dataclass
class Call:
    """What all stages of this rank read while a step runs.

    Attributes:
        constants: arguments that are the same for each micro-batch.
        loss: how the last stage computes the loss.
    """

    constants: Mapping[str, Any] = field(default_factory=dict)
    loss: StepLoss | None = None


class StageForward:
    """Stands in the place of a part's forward: positional arguments are what the stage before sent.

    Args:
        own: the model's forward.
        without_cache: whether it has an argument `use_cache`.
    """

    def __init__(self, stage: Stage, own: Callable[..., Any], call: Call, *, without_cache: bool):
        self.stage, self.own, self.call = stage, own, call
        self.fixed = {"use_cache": False} if without_cache else {}

    def __call__(self, *received: Tensor, **inputs: Any) -> Any:
        if self.call.loss is None:
            raise ValueError("a stage runs inside of a pipeline's step alone: call step(input_ids=..., labels=...)")
        given = {**self.call.constants, **self.fixed, **inputs}
        taken = tuple(_Taken.apply(x) for x in received)
        if not self.stage.is_last:
            if self.call.loss.function is not None:
                given.pop("labels", None)  # the function's: no stage's model gets them
            return tuple(_sent(x) for x in self.stage.run(taken, self.own, **given))
        return self.call.loss.of(lambda inputs: self.stage.run(taken, self.own, **inputs), given)


class _Taken(torch.autograd.Function):
    """The same values; the gradient is sent, and so must be contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def _sent(x: Tensor) -> Tensor:
    """What can be sent; torch detaches it in place, which a view forbids."""
    return x.clone(memory_format=torch.contiguous_format) if x._is_view() or not x.is_contiguous() else x


def set_stage_forward(part: nn.Module, stage: Stage, call: Call, *, without_cache: bool) -> None:
    """Put a `StageForward` in the place of the part's forward."""
    part.__dict__["forward"] = StageForward(stage, part.forward, call, without_cache=without_cache)
    if hasattr(part, "generate"):
        part.__dict__["generate"] = _refuse_generate


def _refuse_generate(*_: Any, **__: Any) -> Never:
    raise ValueError(
        "generate needs the whole model, and its caches: a stage has a part of it (save_checkpoint writes all)"
    )
