"""Applying a plan that `apply_plan` refuses, to see whether it is really wrong."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardplan import load_plan
from shardplan.compiler.layout import ModelLayouts
from shardplan.compiler.lowering_stage import program_of
from shardplan.compiler.user_inputs import Model, find_model, read_plan
from shardplan.compiler.variants import bind_variants, check_variants, prove_layouts
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import NO_OVERLAYS, overlays_of
from shardplan.runtime.apply.phases import apply_program
from shardplan.runtime.apply.plan_mesh import read_mesh

from .adversary import Adversary


class NotAppliedError(Exception):
    """The plan cannot be applied at all: it does not bind to the model, or not at this size."""


def apply_anyway(adversary: Adversary, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """What `apply_plan` does, whatever the layout check finds.

    Raises:
        NotAppliedError: binding or the structural checks have errors.
    """
    source = Model(model, inputs=adversary.given_inputs)
    found, _ = find_model(source)
    plan = load_plan(adversary.plan) if adversary.plan not in ("auto", "hf") else adversary.plan
    given = read_plan(plan, found)
    read, about = given.plan, given.findings
    on = overlays_of(adversary.sequence_parallel)
    variants = check_variants(bind_variants(read, found.tree, MeshSizes(tp=adversary.tp), {NO_OVERLAYS, on}))
    errors = [d for d in (*about, *variants.findings[on]) if d.is_error]
    if errors:
        raise NotAppliedError(" ".join(f"{d.code} {d.message}" for d in errors))
    layouts = prove_layouts(variants, read, ModelLayouts(found, adversary.tp), allow_unproven=True)
    program = program_of(layouts, on)
    return apply_program(model, read_mesh(mesh), program, src_data_rank=0)
