"""The reduced model of a model with state space layers has heads and groups for as many ranks as the model."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from sampling import sampled
from test_reduced_model import step
from transformers import AutoConfig

import shardplan
from shardplan.model import found_from_config
from shardplan.model.reduced.counts import same_relation
from shardplan.model.reduced.reduced_model import make_reduced_model
from shardplan.model.reduced.state_spaces import small_state_heads
from tests.variants.published import checkpoints

ZAMBA = {"num_hidden_layers": 12, "layers_block_type": ["linear_attention", "hybrid"] * 6}
GRANITE = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "mamba_d_state": 128,
    "num_local_experts": 8,
}
# What a published size differs in from the default configuration; fewer layers than it has.
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "Zamba2-1.2B": ("zamba2", ZAMBA | {"hidden_size": 2048, "n_mamba_heads": 64}),
    "Zamba2-7B": (
        "zamba2",
        ZAMBA | {"hidden_size": 3584, "n_mamba_heads": 112, "mamba_ngroups": 2, "num_mem_blocks": 2},
    ),
    "Bamba-9B": ("bamba", {"attn_layer_indices": [9, 18, 27]}),
    "Bamba of 4 groups": ("bamba", {"attn_layer_indices": [9, 18, 27], "mamba_n_groups": 4}),
    "Granite-4.0-H-Tiny": (
        "granitemoehybrid",
        GRANITE | {"hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 4, "mamba_n_heads": 48},
    ),
    "Granite-4.0-H-Small": ("granitemoehybrid", GRANITE | {"num_key_value_heads": 8, "mamba_n_heads": 128}),
    "Falcon-H1-1.5B": (
        "falcon_h1",
        {"hidden_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
        | {"mamba_d_ssm": 3072, "mamba_n_heads": 48, "mamba_d_head": 64},
    ),
    "Falcon-H1-34B": (
        "falcon_h1",
        {"hidden_size": 5120, "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 128}
        | {"mamba_d_ssm": 4096, "mamba_n_heads": 32, "mamba_n_groups": 2, "mamba_d_head": 128},
    ),
    "Codestral-Mamba-7B": ("mamba2", {}),
    **{
        one.name.removeprefix("nvidia/"): (one.model_type, one.fields)
        for one in checkpoints()
        if one.name.endswith(("Nemotron-H-4B-Base-8K", "Nemotron-H-8B-Base-8K", "Nano-9B-v2", "Nano-30B-A3B-BF16"))
    },
}
NAMES = {
    "heads": ("mamba_num_heads", "n_mamba_heads", "mamba_n_heads", "num_heads"),
    "dim": ("mamba_head_dim", "mamba_headdim", "mamba_d_head", "head_dim"),
    "groups": ("n_groups", "mamba_ngroups", "mamba_n_groups"),
    "state": ("ssm_state_size", "mamba_d_state", "state_size"),
    "hidden": ("hidden_size",),
}


def config_of(size: str) -> Any:
    model_type, fields = SIZES[size]
    return AutoConfig.for_model(model_type, **fields)


def reduced(size: str, tp: int) -> Any:
    return make_reduced_model(found_from_config(config_of(size)), tp=tp).config


def numbers(config: Any) -> dict[str, int]:
    return {what: next(getattr(config, n) for n in names if hasattr(config, n)) for what, names in NAMES.items()}


@pytest.mark.parametrize(
    ("size", "tp"),
    [
        *product(SIZES, (8,)),
        *(pytest.param(size, 2, marks=pytest.mark.slow) for size in SIZES),
        *sampled(product(SIZES, (3, 4, 16)), 12, marks=[pytest.mark.slow]),
    ],
)
def test_its_numbers_stand_to_tp_as_the_originals(size: str, tp: int) -> None:
    large, small = numbers(config_of(size)), numbers(reduced(size, tp))
    for what in ("heads", "groups"):
        assert same_relation(small[what], large[what], tp), what
    if large["groups"] < tp and tp % large["groups"] == 0:  # ranks that share a group share out its state
        assert small["groups"] == large["groups"]
        ranks = tp // small["groups"]
        assert (small["state"] % ranks == 0) == (large["state"] % ranks == 0)
    assert small["heads"] % small["groups"] == 0
    assert small["state"] not in (small["heads"], small["groups"]), "what splits is told from what does not"
    assert (small["heads"] == small["groups"]) == (large["heads"] == large["groups"])
    inner, whole = small["heads"] * small["dim"], large["heads"] * large["dim"]
    if whole % large["hidden"] == 0:
        assert inner * large["hidden"] == whole * small["hidden"]
    else:
        assert (inner > small["hidden"]) == (whole > large["hidden"])


def test_one_name_for_heads_and_groups_that_divide_them() -> None:
    small, groups = small_state_heads({"heads": [48], "mamba_groups": [6]}, 4, 1)
    assert small is groups and small[48] % small[6] == 0
    small, groups = small_state_heads({"heads": [32, 8], "mamba_heads": [128], "mamba_groups": [1]}, 8, 1)
    assert (small, groups) == ({8: 8, 32: 16}, {1: 1, 128: 32})


def test_a_width_of_its_own_is_that_of_the_heads() -> None:
    """It is the state space layer's, and no multiple of the hidden size."""
    config = reduced("Falcon-H1-34B", 8)
    assert config.mamba_d_ssm == config.mamba_n_heads * config.mamba_d_head < config.hidden_size


def test_it_trains() -> None:
    loss, gradients = step(make_reduced_model(found_from_config(config_of("Zamba2-7B")), tp=8))
    assert loss > 0 and all(grad is not None and grad.any() for name, grad in gradients.items() if "mamba" in name)


@pytest.mark.parametrize(
    "size",
    [
        "Bamba of 4 groups",
        pytest.param("Bamba-9B", marks=pytest.mark.slow),
        *(
            pytest.param(size, marks=pytest.mark.exhaustive)
            for size in (
                "Nemotron-H-8B-Base-8K",
                "Zamba2-7B",
                "Granite-4.0-H-Small",
                "NVIDIA-Nemotron-Nano-9B-v2",
                "Nemotron-H-4B-Base-8K",
                "Zamba2-1.2B",
                "Codestral-Mamba-7B",
            )
        ),
    ],
)
def test_it_is_proven_at_eight_ranks(size: str) -> None:
    report = shardplan.validate(config_of(size), "auto", {"tp": 8})
    assert report.ok and report.proven, report.diagnostics


def test_heads_that_eight_ranks_do_not_divide_are_the_models_own() -> None:
    """Twelve attention heads: what is refused is the plan for the model, not for the reduced one."""
    report = shardplan.validate(config_of("Granite-4.0-H-Tiny"), "auto", {"tp": 8}, proof=False)
    assert {one.code for one in report.diagnostics if one.is_error} == {"SP301"}, report.diagnostics
