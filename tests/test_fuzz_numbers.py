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


@pytest.mark.parametrize(
    ("name", "settings"),
    [("qwen3_next", {"moe_intermediate_size": 0}), ("mixtral", {"vocab_size": 0})],
    ids=["no width", "no vocabulary"],
)
def test_sizes_of_zero(name: str, settings: dict[str, int]) -> None:
    assert not shardplan.validate(shardplan.Model(name, settings=settings), "auto", {"tp": 2}).ok


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 20))
def test_more_absurd_numbers_are_answered(seed: int) -> None:
    answer(seed)
