"""Model types whose default configuration, in transformers 5.23, cannot be built or run, and what to say for it."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from shardplan.models import find_any, find_model
from shardplan.models.found import FoundModel

ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
INDEXER = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256}
INDEXER |= {"indexer_budget": 64, "indexer_compress_ratio": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "big_bird": {"attention_type": "original_full"},  # block-sparse attention is replaced while a short input runs
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 8, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": [*("conv", "conv", "full_attention") * 10, "conv", "conv"]},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "xmod": {"default_language": "en_XX", "is_decoder": True},
}


def find(model_type: str) -> FoundModel:
    """The model of a type, from its default configuration or the nearest that can be built."""
    if model_type not in SETTINGS:
        return find_model(model_type)
    return find_any(AutoConfig.for_model(model_type, **SETTINGS[model_type]))
