"""All phases of applying a plan, for each stage of this rank."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardplan.compiler.lower.program import Program
from shardplan.core.mesh import APPLIED, Axis
from shardplan.core.module_program import ModuleProgram
from shardplan.core.stages import PipelineCut
from shardplan.core.tree import ancestors, full_name
from shardplan.model.adapters import unwrapped
from shardplan.runtime.apply.applied import AppliedParts, applied, mark_unusable
from shardplan.runtime.apply.failed_steps import OtherRankFailed, Ranks
from shardplan.runtime.apply.phases import apply_program

from .cut_model import CUT, absent_of, cut_model, empty, state_of
from .pipelined_model import Layout, Pipeline, Whole
from .stage_forward import Call, refuse_backward_hooks, set_stage_forward
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


# The ranks that apply a plan to their stages: the ranks of one stage communicate; all ranks learn of a failure.
class StageRanks(Ranks):
    """Within a step only the ranks of a stage compare, as other stages have other parameters. At its end all ranks compare.

    Args:
        stage: the mesh of the ranks that have the same stages as this one.
        whole: the mesh of all ranks.
    """

    def __init__(self, stage: DeviceMesh, whole: DeviceMesh):
        super().__init__(stage)
        self.everyone = Ranks(whole)

    @contextmanager
    def step(self) -> Iterator[None]:
        with self.everyone.step():
            try:
                with super().step():
                    yield
            except OtherRankFailed:
                self.everyone.go_on()  # the rank that failed reports it to all now
                raise


# The program of one stage: the whole model's program, restricted to the stage's modules and parameters.
def program_of_stage(program: Program, cut: PipelineCut, stage: int) -> Program:
    """The program of a stage. Modules that run in every stage are in all programs."""
    absent = cut.absent_from(stage)
    roots = frozenset(absent)

    def has(name: str) -> bool:
        return name not in roots and not any(name.startswith(f"{root}.") for root in absent)

    def own(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in names if has(name))

    every = program.resolved.tree.parameters
    around, around_own = ({above for name in names for above in ancestors(name)} for names in (every, own(every)))
    elsewhere = around - around_own  # modules all of whose parameters are in other stages

    def restricted(module: ModuleProgram) -> ModuleProgram:
        """Drop parameters of other stages: code around the blocks runs in each stage, and reads them as zeros there. These have the
        shapes of the unsharded model, so that code which reads no others counts as in that."""
        own = tuple(p for p in module.parameters if has(full_name(module.name, p.name)))
        read = tuple((at, p) for at, p in module.also_reads if has(full_name(full_name(module.name, at), p.name)))
        module = replace(module, parameters=own, also_reads=read)
        return replace(module, divide=(), settings=()) if module.name in elsewhere else module

    whole = program.resolved
    resolved = replace(
        whole,
        dp_units=own(whole.dp_units),
        dp_parts=own(whole.dp_parts),
        dp_experts=own(whole.dp_experts),
        dp_ignored=frozenset(own(whole.dp_ignored)),
        ac_modules=own(whole.ac_modules),
        compile_modules=own(whole.compile_modules),
    )
    variants = {
        overlays: _linked({name: restricted(module) for name, module in modules.items() if has(name)})
        for overlays, modules in program.variants.items()
    }
    return Program(resolved, variants)


def _linked(modules: dict[str, ModuleProgram]) -> dict[str, ModuleProgram]:
    """Drop the scope of an embedding whose partial sum ends in another stage."""
    if any(module.link == "block_input" for module in modules.values()):
        return modules
    return {name: replace(module, link=None) if module.link == "scope" else module for name, module in modules.items()}
