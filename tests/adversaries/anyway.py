"""Applying a plan that `apply_plan` refuses, to see whether it is really wrong."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardplan import load_plan
from shardplan.compiler.layout import ModelLayouts
from shardplan.compiler.lowering_stage import program_of
from shardplan.compiler.user_inputs import Model, find_model, read_plan
from shardplan.compiler.variants import bind_variants, check_variants, prove_layouts, prove_stages
from shardplan.core.plan import overlays_of, without_sequence
from shardplan.runtime.apply.phases import apply_program
from shardplan.runtime.apply.plan_mesh import read_mesh
from shardplan.runtime.pipeline import Pipeline
from shardplan.runtime.pipeline.apply_stages import apply_stages
from shardplan.runtime.pipeline.layout_of_stages import lay_out
from shardplan.runtime.pipeline.pipeline_options import read_pipeline

from .adversary import Adversary


class NotAppliedError(Exception):
    """The plan cannot be applied at all: it does not bind to the model, or not at this size."""


def apply_anyway(adversary: Adversary, model: nn.Module, mesh: DeviceMesh) -> nn.Module | Pipeline:
    """What `apply_plan` does, whatever the layout check finds.

    Raises:
        NotAppliedError: binding or the structural checks have errors.
    """
    source = Model(model, inputs=adversary.given_inputs)
    found, _ = find_model(source)
    plan = load_plan(adversary.plan) if adversary.plan not in ("auto", "hf") else adversary.plan
    given = read_plan(plan, found)
    read, about = given.plan, given.findings
    meshed = read_mesh(mesh)
    sizes = meshed.sizes
    on = overlays_of(adversary.sequence_parallel and (sizes.tp or 1) > 1, sizes, context=read.has_context)
    variants = check_variants(bind_variants(read, found.tree, sizes, {without_sequence(on), on}))
    errors = [d for d in (*about, *variants.findings[on]) if d.is_error]
    if errors:
        raise NotAppliedError(" ".join(f"{d.code} {d.message}" for d in errors))
    reduced = ModelLayouts.for_mesh(found, variants.resolved.values(), sizes, whole=False)
    variants = prove_layouts(variants, read, reduced, allow_unproven=True)
    if adversary.staged:
        variants, staged = prove_stages(variants, read, reduced, allow_unproven=True, anyway=True)
        if staged is None or not staged.ok:
            raise NotAppliedError("the model has no stages")
    program, stages = program_of(variants, on), read_pipeline(adversary.applying.get("pipeline"), meshed)
    if stages is None:
        return apply_program(model, meshed, program, src_data_rank=0)
    layout = lay_out(meshed, program.resolved, stages.record, stages.stages_per_rank, stages.micro_batches)
    return apply_stages(model, layout, program, stages.micro_batches, stages.loss_fn, compare=True, src_data_rank=0)
