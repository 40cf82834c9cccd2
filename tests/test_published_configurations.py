"""Built-in plans are right for configurations that models are published with, beside the defaults of their types."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from transformers import AutoConfig

import shardplan


class Row(NamedTuple):
    """A configuration: its model type, what it changes of the defaults, and whether its plan has sequence parallelism."""

    model_type: str
    settings: dict[str, Any]
    sequence_parallel: bool = True


ATTENTION_ONLY = {"num_hidden_layers": 4, "layer_types": ["attention"] * 4}
MIXED = {"num_hidden_layers": 4, "layer_types": ["mamba", "attention"] * 2}
DOTS = {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2}
LITE = {"num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1}

QUICK = [
    Row("cohere", {"use_qk_norm": True}),  # Command R+
    Row("deepseek_v3", {"q_lora_rank": None, "first_k_dense_replace": 1}),  # Moonlight
    Row("nemotron_h", {"hybrid_override_pattern": "M-M*-"}, sequence_parallel=False),  # Nemotron-H 8B
]
SLOW = [
    Row("glm4_moe", {"use_qk_norm": True, "first_k_dense_replace": 3}),  # GLM-4.5
    Row("granitemoehybrid", {"num_local_experts": 0} | ATTENTION_ONLY),  # Granite 4.0 1b
    Row("bamba", {"num_hidden_layers": 3, "attn_layer_indices": [1]}),  # Bamba 9B has three of 32
    Row("nemotron_h", {"hybrid_override_pattern": "M-M-"}, sequence_parallel=False),
    Row("nemotron_h", {"hybrid_override_pattern": "MEM*E"}, sequence_parallel=False),  # Nemotron 3 Nano
    Row("granitemoehybrid", {"num_local_experts": 0} | MIXED),  # Granite 4.0 350m
    Row("granitemoehybrid", MIXED),  # Granite 4.0 tiny
    Row("granitemoeshared", {"shared_intermediate_size": 1024}),
    Row("granitemoe_swa", {"shared_intermediate_size": 1024}),
    Row("deepseek_v3", {"first_k_dense_replace": 0}),
    Row("deepseek_v2", LITE | {"q_lora_rank": None}),  # DeepSeek-V2-Lite
    Row("deepseek_v2", LITE | {"moe_intermediate_size": 1536}),  # DeepSeek-V2
    Row("deepseek_v2", LITE | {"moe_intermediate_size": 1407}),  # the type's default width, with a dense layer
    Row("stablelm", {"qk_layernorm": True}),
    Row("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),  # StableLM 2 12B
    Row("cohere2_moe", {"num_shared_experts": 1}),
    Row("cohere2_moe", {"first_k_dense_replace": 1, "num_hidden_layers": 4}),
    Row("cohere2_moe", {"num_shared_experts": 2, "first_k_dense_replace": 1, "num_hidden_layers": 4}),
    Row("dots1", DOTS | {"first_k_dense_replace": 1}),  # dots.llm1
    Row("dots1", DOTS | {"first_k_dense_replace": 0}),
    Row("flint", {"mlp_only_layers": []}),
    Row("flint", {"mlp_only_layers": [0], "attention_bias": True}),
    Row("phi", {"qk_layernorm": True}),
    Row("persimmon", {"qk_layernorm": False}),
    Row("jamba", {"num_experts": 1}),  # Jamba Reasoning 3B
    Row("qwen2_moe", {"mlp_only_layers": [0], "decoder_sparse_step": 2}),
    Row("ernie4_5_moe", {"moe_num_shared_experts": 0}),
    Row(
        "falcon", {"new_decoder_architecture": True, "num_attention_heads": 128, "hidden_size": 8192, "num_kv_heads": 8}
    ),  # 40B
    Row("falcon", {"multi_query": False, "alibi": True, "parallel_attn": False, "bias": True}),  # RW 1B
    Row("gemma3_text", {"num_attention_heads": 4, "num_key_value_heads": 1}),  # Gemma 3 1B
    Row("doge", {"is_moe": True}),  # Doge 120M MoE
    Row("youtu", {"q_lora_rank": None}),
    Row("minicpm3", {"q_lora_rank": None}),
    Row("kimi_linear", {"first_k_dense_replace": 0, "num_hidden_layers": 8}),
    Row("kimi_linear", {"first_k_dense_replace": 2, "num_hidden_layers": 8, "n_shared_experts": 2}),
]


def named(row: Row) -> str:
    return f"{row.model_type}-{'-'.join(row.settings)}"


@pytest.mark.parametrize(
    "row", [*QUICK, *(pytest.param(row, marks=pytest.mark.slow, id=named(row)) for row in SLOW)], ids=named
)
def test_the_built_in_plan_is_proven(row: Row) -> None:
    report = shardplan.validate(AutoConfig.for_model(row.model_type, **row.settings), "auto", tp=2)
    assert report.ok and report.proof is not None and report.proof.ok, report.diagnostics
    assert report.variants == ("tensor_parallel", *(("sequence_parallel",) if row.sequence_parallel else ()))
