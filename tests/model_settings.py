"""Model types whose default configuration, in transformers 5.23, cannot be built or run, and what to say for it."""

from __future__ import annotations

import copy
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from shardplan.model import find_any, find_model
from shardplan.model.config_numbers import text_config
from shardplan.model.found import FoundModel

ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
INDEXER = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256}
INDEXER |= {"indexer_budget": 64, "indexer_compress_ratio": 4}
MROPE = ROPE | {"mrope_section": [16, 24, 24]}
QWEN_VL = {
    "text_config": {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "rope_parameters": MROPE}
}
SETTINGS: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": {"num_attention_heads": 16}},
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
    "llama4": {"vision_config": {"hidden_size": 1408, "vision_output_dim": 4096}},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen2_vl": QWEN_VL,
    "qwen2_5_vl": QWEN_VL | {"vision_config": {"hidden_size": 1280, "out_hidden_size": 3584}},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "xmod": {"default_language": "en_XX", "is_decoder": True},
}


# Of types with two classes, the one that takes images is found by its name.
IMAGE_TEXT = {name: kind for kind, name in reversed(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items())}


def find(name: str) -> FoundModel:
    """The model of a type, or of an image-text class, from its default configuration or the nearest that can be built."""
    if name not in SETTINGS and name not in {*IMAGE_TEXT, *IMAGE_TEXT.values()}:
        return find_model(name)
    model_type = IMAGE_TEXT.get(name, name)
    config = AutoConfig.for_model(model_type, **SETTINGS.get(model_type, {}))
    if name in IMAGE_TEXT:
        config.architectures = [name]
    vision, text = getattr(config, "vision_config", None), text_config(config)
    if getattr(
        vision, "out_hidden_size", None
    ):  # some defaults hand on features that the default text model cannot take
        vision.out_hidden_size = text.hidden_size
    return find_any(config)


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of a configuration that can be trained with tensor parallelism."""
    config = copy.deepcopy(config)
    for part in (config, text_config(config)):
        for field, value in vars(part).items():
            if ("drop" in field and isinstance(value, float)) or field.endswith("_pdrop"):
                setattr(part, field, 0.0)
    return config
