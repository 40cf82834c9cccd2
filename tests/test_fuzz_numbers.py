"""Configurations with one absurd number: `validate` answers with findings."""

from __future__ import annotations

import math
import random

import pytest
from transformers import AutoConfig

import shardplan

TYPES = ("llama", "mixtral", "gpt2", "gemma3_text", "deepseek_v3", "qwen3_next")
VALUES = (0, -1, 2**31, 10**9, None, "x", math.nan, [], [1, 2], 1.5, True)


def number_fields(name: str) -> list[str]:
    found = AutoConfig.for_model(name).to_dict()
    return [field for field, value in found.items() if value is None or isinstance(value, int | float)]


def answer(seed: int) -> None:
    """A configuration that cannot be built or run is a finding (SP509, SP510, SP523, ...), and an answer comes."""
    draw = random.Random(seed)
    name = draw.choice(TYPES)
    settings = {draw.choice(number_fields(name)): draw.choice(VALUES)}
    report = shardplan.validate(shardplan.Model(name, settings=settings), "auto", {"tp": 2})
    assert report.ok or all(finding.message for finding in report.diagnostics), settings


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_an_absurd_number_is_answered(seed: int) -> None:
    answer(seed)


def test_a_vocabulary_of_zero_is_refused() -> None:
    assert not shardplan.validate(shardplan.Model("mixtral", settings={"vocab_size": 0}), "auto", {"tp": 2}).ok


def test_experts_of_zero_width_leave_the_router_its_auxiliary_loss() -> None:
    """Nothing else reads the router, and a call with `output_router_logits=True` does."""
    report = shardplan.validate(shardplan.Model("qwen3_next", settings={"moe_intermediate_size": 0}), "auto", {"tp": 2})
    assert report.proven and report.proof is not None
    gate = [row for row in report.proof.rows if row.kind == "gradient" and row.name.endswith("mlp.gate.weight")]
    assert gate and {row.verdict for row in gate} == {"equal"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 20))
def test_more_absurd_numbers_are_answered(seed: int) -> None:
    answer(seed)
