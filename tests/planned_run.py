"""A built-in plan on the reduced model of its architecture, as the proof runs it on two ranks."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import torch

from shardplan.compiler.lower import Program
from shardplan.compiler.lowering_stage import program_of
from shardplan.compiler.variants import any_error, bind_variants, check_variants
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import PlanFile, overlays_of
from shardplan.language import parse_plan
from shardplan.proof.simulate import Run
from shardplan.proof.steps import cast
from tests.soundness.judge import Subject, _layouts, subject


def planned_run(name: str, plan: str = "", *, sequence_parallel: bool) -> tuple[Subject, Program, Run]:
    """The model, the program of the plan, and the unsharded side in float64. The plan has the name of the model type where it is not named."""
    for times in (1, 2, 4):  # CodeGen's plan splits groups of heads
        model = subject(name, 2, heads_times=times)
        if ran := run_of(model, parse_plan(plan or name).plan, sequence_parallel=sequence_parallel):
            return model, *ran
    raise AssertionError(f"{plan or name} is refused")


def run_of(model: Subject, plan: PlanFile, *, sequence_parallel: bool) -> tuple[Program, Run] | None:
    """As `planned_run`; None where the structural checks or the layout check refuse the plan."""
    on = overlays_of(sequence_parallel)
    variants = check_variants(bind_variants(plan, model.tree, MeshSizes(tp=2), {on, overlays_of(False)}))
    if any_error(variants.findings[on]):
        return None
    layouts = {on: _layouts(model, variants.resolved[on], help=False)}
    if not layouts[on].ok:
        return None
    kind = next(iter(model.recorded_models))
    batches = [cast(batch, torch.float64) for batch in model.batches[kind]]
    run = Run(partial(copy.deepcopy, model.models[torch.float64]), [batches], [model.steps[kind][torch.float64]])
    return program_of(replace(variants, layouts=layouts), on), run
