"""All phases of applying a plan, for each stage of this rank."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from shardplan.compiler.lower.program import Program
from shardplan.core.mesh import APPLIED, Axis
from shardplan.model.adapters import unwrapped
from shardplan.runtime.apply.applied import AppliedParts, applied, mark_unusable
from shardplan.runtime.apply.phases import apply_program

from .cut_model import CUT, absent_of, cut_model, empty, state_of
from .pipelined_model import Layout, Pipeline, Whole
from .stage_forward import Call, refuse_backward_hooks, set_stage_forward
from .stage_programs import program_of_stage
from .stage_ranks import StageRanks
from .step_loss import LossFunction


def apply_stages(
    model: nn.Module,
    layout: Layout,
    program: Program,
    micro_batches: int,
    loss_function: LossFunction | None,
    *,
    compare: bool,
    **options: Any,
) -> Pipeline:
    """Cut a model, and run the phases for each stage of this rank. Afterwards the model is empty.

    Args:
        compare: compare the inputs of pp and tp ranks, and the weights of replicas.
        options: of `apply_program`.

    Raises:
        ValueError: the model itself has a backward hook; or as in `cut_model`.
        PlanError, ValueError, RuntimeError: as in `apply_program`; the model and all parts are then unusable.
    """
    refuse_backward_hooks(model)
    stage_mesh = layout.mesh.within_stage
    ranks = StageRanks(stage_mesh.mesh, layout.mesh.mesh)
    call = Call()
    with ranks.step():
        made = cut_model(model, layout.cut, layout.own)
        call.stages = tuple(stage for _, stage in made)
        whole = Whole(state_of(unwrapped(model)), {stage: absent_of(model, layout.cut, stage) for stage in layout.own})
        mark_unusable(model, "the cut into stages", CUT)
        empty(model, [module for absent in whole.absent.values() for module in absent.modules.values()])
    if program.experts:
        # Makes process groups, whose names torch counts: call it on all ranks, even if a rank's stages have no experts.
        stage_mesh.ep  # noqa: B018
    parts: dict[int, nn.Module] = {}
    for index, (part, stage) in zip(layout.own, made, strict=True):
        # Before the phases, so that it is inside of all wrappers that they put around the model's forward.
        set_stage_forward(part, stage, call, without_cache=_has_cache(unwrapped(part)))
        own = program_of_stage(program, layout.cut, index)
        parts[index] = apply_program(
            part, stage_mesh, own, ranks=ranks, place=(index,), kind="stage", compare=compare, **options
        )
        stage.watch()
    count, blocks = layout.cut.stages, ", ".join(map(str, layout.cut.sizes))
    title = (
        f"pipeline on {layout.mesh.sizes.text((Axis.PP, *APPLIED))}: {count} stages of {blocks} blocks, schedule "
        f"{layout.schedule.name}, {micro_batches} micro-batches; stages {', '.join(map(str, layout.own))} here"
    )
    record = AppliedParts(title, program, layout.mesh, tuple(applied(part) for part in parts.values()))
    return Pipeline(parts, layout, micro_batches, call, loss_function, record, whole, compare=compare)


def _has_cache(model: nn.Module) -> bool:
    return (
        "use_cache" in inspect.signature(type(model).forward).parameters
        or "use_cache" in inspect.signature(model.forward).parameters
    )
