"""Pipelines in real processes: losses, gradients, norms and optimizer steps equal the unsharded model's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pipeline_runs import GPT2, Recipe, compare

LAYERS = ["sliding_attention", "full_attention"] * 2
LLAMA = Recipe("llama", {"pp": 2})
TIED = Recipe("qwen2", {"pp": 2}, tied=True)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped", "zero_bubble", "zbv", "dualpipev")
MESHES = {
    "tp": {"pp": 2, "tp": 2},
    "dp": {"pp": 2, "dp_shard": 2},
}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_two_stages(schedule: str) -> None:
    compare(replace(LLAMA, schedule=schedule))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES[2:])
def test_a_tied_parameter_in_several_stages(schedule: str) -> None:
    compare(replace(TIED, schedule=schedule, sizes=MESHES["dp"]))


FAMILIES = {
    "llama": replace(LLAMA, sizes=MESHES["tp"], sequence_parallel=True),
    "gemma": Recipe("gemma3_text", MESHES["tp"], tied=True, sequence_parallel=True, settings={"layer_types": LAYERS}),
    "gpt2": Recipe("gpt2", MESHES["tp"], tied=True, section=GPT2, settings={"n_layer": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    compare(FAMILIES[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("recipe", [LLAMA, TIED], ids=lambda recipe: recipe.model)
def test_each_schedule_on_each_mesh(recipe: Recipe, mesh: str, schedule: str) -> None:
    compare(replace(recipe, sizes=MESHES[mesh], schedule=schedule, sequence_parallel="tp" in MESHES[mesh]))
