"""Pipelines in real processes: losses, gradients, norms and optimizer steps equal the unsharded model's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pipeline_runs import GPT2, Recipe, compare
from torch import Tensor, nn

LAYERS = ["sliding_attention", "full_attention"] * 2
LLAMA = Recipe("llama", {"pp": 2})
TIED = Recipe("qwen2", {"pp": 2}, tied=True)
SCHEDULES = ("gpipe", "1f1b", "interleaved")
TP = {"pp": 2, "tp": 2}
DP = {"pp": 2, "dp_shard": 2}
MESHES = {"tp": TP, "dp": DP}
EIGHT = {"pp 2 x dp 2 x tp 2": {"pp": 2, "dp_shard": 2, "tp": 2}, "pp 4 x tp 2": {"pp": 4, "tp": 2}}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.proves("pp")
def test_two_stages(schedule: str) -> None:
    compare(replace(LLAMA, schedule=schedule))


@pytest.mark.slow
@pytest.mark.proves("pp fsdp2")
def test_a_tied_parameter_in_several_stages() -> None:
    compare(replace(TIED, schedule="interleaved", sizes=DP))


def router_loss(output: Any) -> Tensor:
    return 0.001 * output.aux_loss


ROUTED = Recipe(
    "qwen3_moe",
    DP,
    section={"layers": "model.layers.*", "carry": ["model.layers.*.mlp.gate"]},
    settings={"mlp_only_layers": []},
    auxiliary=router_loss,
)
FAMILIES = {
    "llama": replace(LLAMA, sizes=TP, sequence_parallel=True),
    "gemma": Recipe("gemma3_text", TP, tied=True, sequence_parallel=True, settings={"layer_types": LAYERS}),
    "gpt2": Recipe("gpt2", TP, tied=True, section=GPT2, settings={"n_layer": 4}),
    "experts": replace(ROUTED, sizes={**DP, "ep": 2}),
    "experts, tp": replace(ROUTED, sizes=TP, sequence_parallel=True),
    "experts on slices of tokens": replace(
        ROUTED, sizes={**TP, "ep": 2}, sequence_parallel=True, schedule="interleaved"
    ),
    "state spaces": Recipe("bamba", TP, settings={"attn_layer_indices": [1, 3]}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.proves("pp tp sp", "pp tp", "pp ep fsdp2", "pp tp sp ep")
def test_families(name: str) -> None:
    compare(FAMILIES[name])


def adapters_in(layers: list[int], model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], layers_to_transform=layers, layers_pattern="layers"
    )
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.5)
    return adapted.to(torch.float64)


def adapters_at_the_end(model: nn.Module) -> nn.Module:
    return adapters_in([2, 3], model)


def adapters_at_the_start(model: nn.Module) -> nn.Module:
    return adapters_in([0, 1], model)


CHECKPOINTED = {"activation_checkpointing": {"modules": ["model.layers.*"]}}
COMPILED = {"compile": {"modules": ["model.layers.*"], "backend": "aot_eager"}}
WITH = {
    "checkpointing": replace(FAMILIES["llama"], options=CHECKPOINTED),
    "a frozen first stage": replace(FAMILIES["llama"], change=adapters_at_the_end, max_norm=0.02),
    "a frozen last stage": replace(LLAMA, sizes=DP, change=adapters_at_the_start, max_norm=0.02),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH)
@pytest.mark.proves("pp tp sp checkpointing", "pp tp sp lora", "pp fsdp2 lora")
def test_one_schedule_with(name: str) -> None:
    compare(WITH[name])


OTHERS = {
    "hybrid sharding": replace(LLAMA, sizes={"pp": 2, "dp_replicate": 2, "dp_shard": 1}),
    "ddp": replace(
        LLAMA,
        sizes={"pp": 2, "dp_replicate": 2, "dp_shard": 1},
        options={"data_parallel": {"backend": "ddp"}},
    ),
    "resharding": replace(LLAMA, sizes=DP, options={"data_parallel": {"reshard_after_forward": True}}),
    "resharding, gpipe": replace(
        LLAMA, sizes=DP, schedule="gpipe", options={"data_parallel": {"reshard_after_forward": True}}
    ),
    "compile": replace(FAMILIES["llama"], options=COMPILED),
    "compile, interleaved": replace(LLAMA, sizes=DP, schedule="interleaved", options=COMPILED),
    "sizes": replace(
        TIED, sizes=DP, section={"layers": "model.layers.*", "sizes": [4, 2]}, settings={"num_hidden_layers": 6}
    ),
    "four stages": replace(TIED, sizes={"pp": 4}),
    "interleaved over four ranks": replace(
        TIED, sizes={"pp": 4}, schedule="interleaved", settings={"num_hidden_layers": 8}, micro_batches=8
    ),
    "checkpointing": replace(LLAMA, sizes=DP, schedule="interleaved", options=CHECKPOINTED),
    "checkpointing, tp": replace(FAMILIES["llama"], schedule="interleaved", options=CHECKPOINTED),
    "a frozen last stage": replace(WITH["a frozen last stage"], sizes=TP, schedule="interleaved"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.proves("pp hsdp", "pp ddp", "pp tp sp compile", "pp fsdp2 compile", "pp fsdp2 checkpointing", "pp tp lora")
def test_also(name: str) -> None:
    compare(OTHERS[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("recipe", [LLAMA, TIED], ids=lambda recipe: recipe.model)
def test_each_schedule_on_each_mesh(recipe: Recipe, mesh: str, schedule: str) -> None:
    compare(replace(recipe, sizes=MESHES[mesh], schedule=schedule, sequence_parallel="tp" in MESHES[mesh]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("sizes", EIGHT)
@pytest.mark.parametrize("recipe", [LLAMA, TIED], ids=lambda recipe: recipe.model)
@pytest.mark.proves("pp tp fsdp2", "pp tp sp fsdp2", "pp tp", "pp tp sp")
def test_eight_ranks(recipe: Recipe, sizes: str, sequence_parallel: bool) -> None:
    compare(replace(recipe, sizes=EIGHT[sizes], sequence_parallel=sequence_parallel), seconds=500.0)
