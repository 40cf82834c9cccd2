"""A frozen vision tower with a trained projector and text model: equal on simulated ranks, and on real ones under FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import on_ranks
from small_models import whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardplan
from shardplan import clip_grad_norm_
from shardplan.proof.compare import relative_error
from tests.proofs import assert_equal, case, reduced_model

TOWER = "model.vision_tower."


def freeze(model: nn.Module) -> None:
    model.model.vision_tower.requires_grad_(False)


@pytest.mark.parametrize(("plan", "sp"), [("llava", True), pytest.param("llava_vision", False, marks=pytest.mark.slow)])
def test_what_is_after_a_frozen_tower_learns_as_unsharded(plan, sp):
    rows = case("llava", sp=sp, kind="image", plan=plan, prepare=freeze).rows()
    assert_equal(rows)
    gradients = {row.name for row in rows if row.kind == "gradient"}
    assert not any(name.startswith(TOWER) for name in gradients)
    assert {"model.multi_modal_projector.linear_1.weight", "lm_head.weight"} <= gradients


def trained_next_to(stored: str) -> None:
    """Both data-parallel ranks read one batch, so the mean of their gradients is the unsharded model's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    reduced = reduced_model("llava", 2)
    inputs = reduced.inputs(kind="image")
    reference, model = reduced.build(), reduced.build()
    for one in (reference, model):
        freeze(one)
    before = {name: p.detach().clone() for name, p in reference.named_parameters() if name.startswith(TOWER)}
    plan: dict[str, Any] = {"version": "1", "name": "frozen-tower", "extends": "llava"}
    plan["data_parallel"] = {"units": ["model.language_model.layers.*"], "frozen": stored}
    shardplan.apply_plan(model, mesh, plan, sequence_parallel=True, prove=False)

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    expected, output = reference(**inputs), model(**inputs)
    expected.loss.backward()
    output.loss.backward()
    assert relative_error(output.loss.detach(), expected.loss.detach()) <= 1e-5
    assert relative_error(whole(output.logits.detach()), expected.logits.detach()) <= 1e-5
    for name, parameter in reference.named_parameters():
        gradient = model.get_parameter(name).grad
        assert (gradient is None) == (parameter.grad is None), name
        assert parameter.grad is None or relative_error(whole(gradient), parameter.grad) <= 1e-5, name

    assert clip_grad_norm_(model.parameters(), 1.0).isfinite()
    optimizer.step()
    for name, value in before.items():
        parameter = model.get_parameter(name)
        axes = parameter.device_mesh.mesh_dim_names
        assert not parameter.requires_grad and ("dp_shard" in axes) == (stored == "own"), name
        assert torch.equal(whole(parameter.detach()), value), name


def test_a_frozen_tower_is_stored_as_the_plan_says():
    for stored in ("replicated", "own"):
        on_ranks(4, trained_next_to, stored)
