"""The forward of a part: from its inputs, through the model's own forward, to its outputs or the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Never

import torch
from torch import Tensor, nn

from shardplan.model.reduced.live import FLAGS
from shardplan.model.stage_stubs import Stage

from .step_loss import StepLoss, loss_dtype


@dataclass
class Call:
    """State that all stages of this rank read while a step runs.

    Attributes:
        constants: arguments that are the same for each micro-batch.
        loss: how the last stage computes the loss.
        stages: the stages of this rank.
    """

    constants: Mapping[str, Any] = field(default_factory=dict)
    loss: StepLoss | None = None
    stages: tuple[Stage, ...] = ()


class StageForward:
    """Replaces a part's forward: positional arguments are the outputs of the stage before.

    Args:
        own: the call of the model, with its hooks.
        without_cache: whether the model has an argument `use_cache`.
    """

    def __init__(self, stage: Stage, own: Callable[..., Any], call: Call, *, without_cache: bool):
        self.stage, self.own, self.call = stage, own, call
        self.fixed = {"use_cache": False} if without_cache else {}

    def __call__(self, *received: Tensor, **inputs: Any) -> Any:
        if self.call.loss is None:
            raise ValueError("a stage runs only inside a pipeline's step: call step(input_ids=..., labels=...)")
        given = {**self.call.constants, **self.fixed, **inputs}
        taken = _Taken.apply(*received) if received else ()
        if not self.stage.is_last:
            if self.call.loss.function is not None:
                given.pop("labels", None)  # only `loss_fn` takes them; no stage's model does
            return tuple(_sent(x) for x in self.stage.run(taken, self.own, **given))
        loss = self.call.loss.of(lambda inputs: self.stage.run(taken, self.own, **inputs), given)
        return loss.to(loss_dtype(x.dtype for x in taken))


class _Taken(torch.autograd.Function):
    """The same values. Their gradients are sent, so they must be contiguous. Unread values get zeros (torch 2.11 would raise;
    later releases send zeros)."""

    @staticmethod
    def forward(ctx: Any, *received: Tensor) -> tuple[Tensor, ...]:
        taken = tuple(x.view_as(x) for x in received)
        ctx.mark_non_differentiable(*(y for x, y in zip(received, taken, strict=True) if not x.requires_grad))
        return taken

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient.contiguous() for gradient in gradients)


def _sent(x: Tensor) -> Tensor:
    """A tensor that can be sent: torch detaches it in place, which a view forbids."""
    return x.clone(memory_format=torch.contiguous_format) if x._is_view() or not x.is_contiguous() else x


class _Called:
    """The call of a model: its own hooks around its forward, as torch runs them. A stage before the last one stops within the
    forward, so the hooks after it run only in the last stage.

    Args:
        part: the model; its forward hooks are removed.
    """

    def __init__(self, part: nn.Module):
        self.part, self.own = part, part.forward
        self.before = [
            (hook, key in part._forward_pre_hooks_with_kwargs) for key, hook in part._forward_pre_hooks.items()
        ]
        self.after = [(hook, key in part._forward_hooks_with_kwargs) for key, hook in part._forward_hooks.items()]
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            hooks.clear()
        for flags in FLAGS:
            if "forward" in flags:
                getattr(part, flags).clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for hook, with_kwargs in self.before:
            changed = hook(self.part, args, kwargs) if with_kwargs else hook(self.part, args)
            if changed is not None and with_kwargs:
                args, kwargs = changed
            elif changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
        output = self.own(*args, **kwargs)
        for hook, with_kwargs in self.after:
            changed = hook(self.part, args, kwargs, output) if with_kwargs else hook(self.part, args, output)
            output = output if changed is None else changed
        return output


def refuse_backward_hooks(model: nn.Module) -> None:
    """Raise ValueError where the model itself has backward hooks: no stage has both its inputs and its outputs."""
    if model._backward_hooks or model._backward_pre_hooks:
        raise ValueError(
            f"{type(model).__name__} has a backward hook, and no pipeline stage has both its inputs and its outputs: put the hook "
            "on a module inside, or on tensors"
        )


def set_stage_forward(part: nn.Module, stage: Stage, call: Call, *, without_cache: bool) -> None:
    """Replace the part's forward by a `StageForward`, around its forward hooks."""
    part.__dict__["forward"] = StageForward(stage, _Called(part), call, without_cache=without_cache)
    if hasattr(part, "generate"):
        part.__dict__["generate"] = _refuse_generate


def _refuse_generate(*_: Any, **__: Any) -> Never:
    raise ValueError(
        "generate needs the whole model, and its caches: a stage has a part of it (save_checkpoint writes all)"
    )
