"""What an adversary is: a model, what it is called with, a plan, and what `validate` must say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, is_dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

import shardplan

Verdict = Literal["right", "wrong", "refused", "unproven", "raises"]


def tensors(value: Any) -> list[tuple[str, Tensor]]:
    """Every tensor of a nest of tuples, lists, mappings and dataclasses, with its place. Other objects hold none."""
    if isinstance(value, Tensor):
        return [("", value)]
    if isinstance(value, Mapping):
        parts = list(value.items())
    elif isinstance(value, tuple | list):
        parts = list(enumerate(value))
    elif is_dataclass(value):
        parts = list(vars(value).items())
    else:
        return []
    return [(f".{key}{place}", tensor) for key, part in parts for place, tensor in tensors(part)]


def squares(output: Any) -> Tensor:
    """A loss in which each element of each differentiable output counts, and counts differently."""
    parts = []
    for _, value in tensors(output):
        if value.is_floating_point() and value.requires_grad:
            value = value if value.dtype == torch.float64 else value.float()
            weight = torch.arange(value.numel(), dtype=value.dtype).cos().view(value.shape)
            parts.append((weight * value).mean() + value.square().mean() / 2)
    return torch.stack(parts).sum()


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Plain steps, large enough to be seen."""
    return torch.optim.SGD(parameters, lr=0.1)


@dataclass(frozen=True)
class Adversary:
    """A model with a plan.

    Args:
        name: the model, a slash, and what the plan does.
        build: makes the model; called after the seed is set.
        inputs: a seed -> keyword arguments of the model's `forward`; also what `validate` is given.
        plan: a plan document, or the name of a built-in plan.
        verdict: what `validate` must say. "right": no error. "wrong": an error. "refused": an error by design, whatever
            the numbers are. "unproven": an error as long as nobody says `allow_unproven`. "raises": no error, but what is done
            after it is: applying or a step raises our own error, or everything is right.
        why: what is right or wrong in it, in a sentence.
        codes: one of these is among the errors. For a right plan: it may be refused by these, and by no other.
        loss: what is run backward, from the output.
        mesh: the sizes of its axes, as `build_mesh` has them.
        sequence_parallel: how it is applied.
        validated: makes the model that `validate` is given, where it is not the one that the plan is applied to afterwards in
            the same process.
        after: done to the model after the plan was applied to it; to each stage of a pipeline.
        auxiliary: the part of the loss that is no mean over tokens, from the output: of a pipeline, the mean over micro-batches.
        stage_loss: (logits, labels) -> the sum over tokens: the loss of a pipeline in place of the model's own, which
            gets no labels then.
        schedule: of a pipeline.
        seeds: of the batches, one a step.
        before: done to the model before each step, with the step's number.
        optimizer: makes it from the trained parameters.
        max_norm: clip gradients to this norm before each step.
        micro_batches: the gradients of that many batches are added up in each step; of a pipeline, the parts of its batch.
        rounding: what two correct runs may differ by, of the largest value, where the model itself computes in another
            dtype than float32 or float64.
        exact: judged in float64 alone, to 1e-9: what is wrong in it is smaller than float32's roundings.
        known: why `validate` does not see what is wrong; counted apart.
        stirred: noise is added to every parameter, as those at zero or one hide wrong gradients.
        own_inputs: `validate` makes inputs itself (a model of transformers).
        own_tokens: it is called inside of `shardplan.context_parallel`, and each rank of cp has the outputs of its own tokens.
        autocast: the dtype that `apply_plan` is told, which then proves the plan in it; `validate` is not told.
        around: what is around all of it, `validate` and training.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Any]]
    plan: Any
    verdict: Verdict
    why: str
    codes: tuple[str, ...] = ()
    loss: Callable[[Any], Tensor] = squares
    mesh: Mapping[str, int] = field(default_factory=lambda: {"tp": 2})
    sequence_parallel: bool = False
    validated: Callable[[], nn.Module] | None = None
    after: Callable[[nn.Module], None] | None = None
    auxiliary: Callable[[Any], Tensor] | None = None
    stage_loss: Callable[[Tensor, Tensor], Tensor] | None = None
    schedule: str = "1f1b"
    seeds: tuple[int, ...] = (0, 1, 2)
    before: Callable[[nn.Module, int], None] | None = None
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = sgd
    max_norm: float | None = None
    micro_batches: int = 1
    rounding: float | None = None
    exact: bool = False
    known: str = ""
    stirred: bool = True
    own_inputs: bool = False
    own_tokens: bool = False
    autocast: str | None = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def ranks(self) -> int:
        """`ep` is a view of the other axes."""
        return prod(size for axis, size in self.mesh.items() if axis != "ep")

    @property
    def staged(self) -> bool:
        return self.mesh.get("pp", 1) > 1

    @property
    def applying(self) -> dict[str, Any]:
        """Keyword arguments of `apply_plan`."""
        given: dict[str, Any] = {"sequence_parallel": self.sequence_parallel, "autocast_dtype": self.autocast}
        if self.staged:
            count = max(self.micro_batches, self.mesh["pp"])
            given["pipeline"] = shardplan.PipelineOptions(self.schedule, count, loss_fn=self.stage_loss)
        return given

    def model(self, dtype: torch.dtype = torch.float32, *, validated: bool = False) -> nn.Module:
        """The model in training mode, the same at each call; in float64 if that is asked for.

        Args:
            validated: the one that `validate` is given.
        """
        torch.manual_seed(0)
        model = (self.build if self.validated is None or not validated else self.validated)().train()
        if self.stirred:
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for parameter in model.parameters():
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.add_(0.02 * noise.to(parameter.dtype))
        return model if dtype == torch.float32 else model.to(dtype)

    @property
    def given_inputs(self) -> Callable[[int], dict[str, Any]] | None:
        """What shardplan is given as `inputs`."""
        return None if self.own_inputs else self.inputs

    def batch(self, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """The keyword arguments of a call; in float64 if that is asked for."""
        made = self.inputs(seed)
        if dtype == torch.float32:
            return made
        return {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in made.items()}


def document(tensor_parallel: Mapping[str, Any], sequence_parallel: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A plan of these rules."""
    sections = {"tensor_parallel": dict(tensor_parallel)}
    if sequence_parallel is not None:
        sections["sequence_parallel"] = dict(sequence_parallel)
    return {"version": "1", "name": "adversary", **sections}
