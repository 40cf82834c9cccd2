"""The numeric proof of a pipeline cut: the stages of the reduced model run one after the other in one process, forward and
backward, against the same model whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardplan.core.report import Compared, Comparison
from shardplan.core.stages import PipelineCut
from shardplan.model.stage_stubs import Stage, stage_of
from shardplan.torchlib.equality import magnitude

from .compare import NEGLIGIBLE, compare, missing_rows, worst_of
from .steps import Batch, Directions, Steps, run_steps

ByStage = Mapping[int, Tensor]


class StagedModel(nn.Module):
    """The stages of a cut as one model. Each gets a copy of what the one before it sent.

    Args:
        build: makes the whole model; each call gives the same weights.
    """

    def __init__(self, build: Callable[[], nn.Module], cut: PipelineCut):
        super().__init__()
        self.cut = cut
        self.stages: list[Stage] = [stage_of(build(), cut, index) for index in range(cut.stages)]
        for index, stage in enumerate(self.stages):
            stage.watch()
            self.add_module(f"stage_{index}", stage.model)

    def forward(self, **inputs: Any) -> Any:
        received: tuple[Tensor, ...] = ()
        for stage in self.stages[:-1]:
            received = tuple(value.clone() for value in stage.run(received, None, **inputs))
        return self.stages[-1].run(received, None, **inputs)

    def gradients(self) -> Mapping[str, ByStage]:
        """Of each parameter of the whole model, the gradient in each stage that has one; of a tie over stages the sum."""
        found: dict[str, dict[int, Tensor]] = defaultdict(dict)
        for index, stage in enumerate(self.stages):
            for name, parameter in stage.model.named_parameters(remove_duplicate=False):
                if parameter.grad is not None:
                    found[name][index] = parameter.grad.detach()
        for names in self.cut.ties:
            of_stages = {index: gradient for name in names for index, gradient in found.get(name, {}).items()}
            if of_stages:
                total = torch.stack([*of_stages.values()]).sum(0)
                found.update({name: dict.fromkeys(of_stages, total) for name in names})
        return found

    def buffers_by_name(self) -> Mapping[str, ByStage]:
        """Of each buffer of the whole model, what it is in each stage that has it."""
        found: dict[str, dict[int, Tensor]] = defaultdict(dict)
        for index, stage in enumerate(self.stages):
            for name, buffer in stage.model.named_buffers(remove_duplicate=False):
                found[name][index] = buffer.detach()
        return found


def staged_rows(
    build: Callable[[], nn.Module], batches: Sequence[Batch], cut: PipelineCut, reference: Steps
) -> tuple[Comparison, ...]:
    """Run the steps in stages, and compare them with the unsharded ones; each row is the worst of the stages.

    Args:
        build: makes the model on the CPU, with the weights of the reference.
        cut: of that model.

    Raises:
        Exception: what the model's code raises in a stage.
    """
    model = StagedModel(build, cut)
    given = iter(reference.directions)

    def directions(results: Mapping[str, Tensor]) -> Directions:
        return next(given)

    outputs = run_steps(model, batches, directions)
    last = cut.stages - 1
    floor = NEGLIGIBLE * max((magnitude(g) for g in reference.gradients.values()), default=0.0)
    rows: list[Comparison] = []
    for expected, found in zip(reference.outputs, outputs, strict=True):
        rows += [
            compare(name, "output", [(f"stage {last}", found[name])], value)
            for name, value in expected.items()
            if name in found
        ]
        rows += missing_rows("output", expected, found)
    compared: tuple[tuple[Compared, Mapping[str, Tensor], Mapping[str, ByStage], float], ...] = (
        ("gradient", reference.gradients, model.gradients(), floor),
        ("buffer", reference.buffers, model.buffers_by_name(), 0.0),
    )
    for kind, expected, in_stages, least in compared:
        rows += [
            compare(name, kind, [(f"stage {i}", got) for i, got in in_stages[name].items()], value, least)
            for name, value in expected.items()
            if name in in_stages
        ]
        rows += missing_rows(kind, expected, in_stages)
    return worst_of(rows)
