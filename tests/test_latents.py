"""Latent attention whose latents are split: they are gathered in front of their norms."""

from __future__ import annotations

from typing import Any

import pytest
from training_runs import TWO_BY_TWO, Recipe, compare

import shardplan
from shardplan import Model

LATENTS = "model.layers.*.self_attn.{q_a_proj,kv_a_proj_with_mqa}"
NORMS = "model.layers.*.self_attn.{q,kv}_a_layernorm"


def child(extends: str, rules: dict[str, Any]) -> dict[str, Any]:
    """A plan with other rules than a built-in one."""
    return {"version": "1", "name": "mine", "extends": extends, "tensor_parallel": rules}


@pytest.mark.parametrize("name", ["minicpm3", pytest.param("youtu", marks=pytest.mark.exhaustive)])
def test_it_is_proven_in_all_variants(name: str) -> None:
    report = shardplan.validate(Model(name), "auto", {"tp": 2})
    assert report.ok and report.proof is not None and report.proof.ok, report.diagnostics


@pytest.mark.slow
def test_it_trains_as_the_unsharded_model() -> None:
    """Losses, norms, clipping, AdamW and every parameter, in real processes, with sequence parallelism."""
    compare(Recipe("minicpm3", TWO_BY_TWO, True))


@pytest.mark.usefixtures("no_repairs")
@pytest.mark.parametrize(
    ("extends", "rules", "codes"),
    [
        # The loss reads the logits in full on every rank.
        ("llama", {"lm_head": {"style": "colwise_gather_output", "grad": "partial"}}, {"SP405"}),
        # The rotary key goes to each rank's own heads.
        ("minicpm3", {LATENTS: "colwise_gather_output"}, {"SP401", "SP406"}),
        ("minicpm3", {NORMS: "none"}, {"SP401"}),
    ],
)
def test_a_wrong_gradient_of_what_is_gathered_is_refused(extends: str, rules: dict[str, Any], codes: set[str]) -> None:
    report = shardplan.validate(extends, child(extends, rules), {"tp": 2}, sequence_parallel=False)
    assert {d.code for d in report.diagnostics} == codes


def test_the_gradient_is_complete_by_default() -> None:
    rules = {"lm_head": {"style": "colwise_gather_output", "grad": "complete"}}
    assert shardplan.validate("llama", child("llama", rules), {"tp": 2}, sequence_parallel=False).diagnostics == ()
