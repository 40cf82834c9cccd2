"""Model types whose default configuration, in transformers 5.17 or 5.23, cannot be built or run, and what to say for it."""

from __future__ import annotations

import copy
from functools import lru_cache
from importlib import import_module
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from shardplan.model import find_any, find_model
from shardplan.model.config_numbers import text_config
from shardplan.model.found import MAPPINGS as AUTOMATIC
from shardplan.model.found import FoundModel

ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
INDEXER = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256}
INDEXER |= {"indexer_budget": 64, "indexer_compress_ratio": 4}
MROPE = ROPE | {"mrope_section": [16, 24, 24]}
QWEN_VL = {
    "text_config": {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "rope_parameters": MROPE}
}
GEMMA_2B = {  # PaliGemma 2's; the default's single key-value head is divided by no size
    "model_type": "gemma2",
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
    "image_size": 224,
    "projection_dim": 2304,
    "vision_use_head": False,
}
HALF = ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
GLM = {"text_config": {"rope_parameters": HALF}}
HUNYUAN = {"head_dim": 128, "rope_parameters": ROPE | {"mrope_section": [16, 16, 16, 16]}}
COMPASS = {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}}
DEEPSEEK_OCR = {
    "mlp_layer_types": ["dense", *["sparse"] * 31],
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
}
DIFFUSION_GEMMA = {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 1024}
THINKER = {"num_attention_heads": 32, "rope_parameters": ROPE}
# Ids that a processor's tokenizer has, where a configuration leaves them out.
PLACES = {"image_token_id": 7, "video_token_id": 8}
BOOK = 8  # codes of an image, in place of thousands
SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), {"prediction_length": 8}),
    # Codes of images and sound lie behind each other in the vocabulary.
    "apertus1p5": {
        "image_token_id": 7,
        "audio_token_id": 8,
        "image_token_offset": 32,
        "audio_token_offset": 32 + BOOK,
        "vision_config": {"codebook_size": BOOK},
        "audio_config": {
            "model_type": "wavtokenizer_encoder",
            "codebook_size": BOOK,
            "decoder_attention_num_groups": 4,
        },
    },
    "aria": {"vision_config": {"image_size": 980, "patch_size": 14}},
    "aya_vision": {"vision_config": {"num_attention_heads": 16}},
    "big_bird": {"attention_type": "original_full"},  # block-sparse attention is replaced while a short input runs
    "bigbird_pegasus": {"attention_type": "original_full"},  # likewise
    "blip-2": {"image_token_index": 7},
    "chameleon": {
        "vq_config": {"num_embeddings": BOOK},
        "vocabulary_map": {"<image>": 9, **{f"IMGIMG{chr(ord('A') + i)}Z": 10 + i for i in range(BOOK)}},
    },
    "cohere_compass": {"text_config": COMPASS},
    "cohere_compass_text": COMPASS,
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 8, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_ocr2": {
        "text_config": DEEPSEEK_OCR,
        "vision_config": {
            "encoder_config": {
                "hidden_size": 896,
                "num_attention_heads": 14,
                "num_key_value_heads": 2,
                "intermediate_size": 4864,
            }
        },
    },
    "deepseek_ocr2_text": DEEPSEEK_OCR,
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffusion_gemma": {"text_config": DIFFUSION_GEMMA},
    "diffusion_gemma_text": DIFFUSION_GEMMA,
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "emu3": {
        "vq_config": {"codebook_size": BOOK},
        "vocabulary_map": {
            "<image>": 9,
            "<|extra_200|>": 8,
            **{f"<|visual token {i:06}|>": 10 + i for i in range(BOOK)},
        },
    },
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "gemma4": {"vision_config": {}},
    "gemma4_unified": {"vision_config": {}},
    "glm46v": GLM,
    "glm4v": GLM,
    "glm4v_moe": {"text_config": {"head_dim": 128}},
    "glm4v_moe_text": {"head_dim": 128},
    "glm4v_text": {"rope_parameters": HALF},
    "glm_image": GLM,
    "glm_image_text": {"rope_parameters": HALF},
    "glmga": GLM,
    "granite4_vision": {
        "deepstack_layer_map": [[-2, 0]],
        "spatial_target_layers": [0, 1, 0, 1],
        "downsample_rate": "1/2",
        "vision_config": {"image_size": 336, "patch_size": 14},
    },
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hunyuan_vl": {"text_config": HUNYUAN},
    "hunyuan_vl_text": HUNYUAN,
    **dict.fromkeys(("idefics3", "smolvlm"), {"pad_token_id": 2}),  # 5.17's is above the vocabulary
    "instructblip": {"image_token_index": 7},
    "instructblipvideo": {"video_token_index": 7},
    "janus": {
        "text_config": {
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "intermediate_size": 5632,
        }
    },
    "lfm2_moe": {"layer_types": [*("conv", "conv", "full_attention") * 10, "conv", "conv"]},
    "llama4": {"vision_config": {"hidden_size": 1408, "vision_output_dim": 4096}},
    "minicpm_ocr": PLACES,
    "minicpmv4_6": PLACES,
    "minicpmv4_7": PLACES,
    "ministral": {"head_dim": 128},
    "moonshine_streaming": {"num_key_value_heads": 8},
    "nemotron": {"num_key_value_heads": 8},
    "molmo2": {"adapter_config": {"text_hidden_size": 4096}},
    "nemotron_h_omni": PLACES | {"audio_token_id": 9},
    "ovis2": {"hidden_size": 4096},
    "paligemma": {"text_config": GEMMA_2B, "projection_dim": 2304, "vision_config": SIGLIP},
    "qwen2_vl": QWEN_VL,
    "qwen2_5_vl": QWEN_VL | {"vision_config": {"hidden_size": 1280, "out_hidden_size": 3584}},
    "qwen3_omni_moe_text": THINKER,
    "qwen3_omni_moe_thinker": {"text_config": THINKER},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
    },  # the widths of its two tables add up to the hidden size
    "step3p7": {"text_config": {"sliding_window": 512}},
    **dict.fromkeys(("wav2vec2-bert", "wav2vec2-conformer"), {"vocab_size": 32}),
    "xmod": {"default_language": "en_XX", "is_decoder": True},
}

# What code draws with random numbers of its own in training (masks of sounds, layers and paths that are left out, positions that are
# moved) is refused, and so switched off.
UNDRAWN = {
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "drop_path_rate": 0.0,
    "pos_embed_rescale": None,
}


# Of types with two classes, the one that takes images is found by its name.
IMAGE_TEXT = {name: kind for kind, name in reversed(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items())}


# Trunks and heads besides those of causal language models: class -> type.
MAPPINGS = (
    "MODEL_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_CTC_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
)
CLASSES = {
    (cls[0] if isinstance(cls, (tuple, list)) else cls): kind
    for mapping in MAPPINGS
    for kind, cls in getattr(modeling_auto, mapping).items()
}


def find(name: str) -> FoundModel:
    """The model of a type, or of a class that is no causal language model, from its default configuration or the nearest that can be built.
    After an @ comes the side of its pictures in pixels, if it is not the default: `ViTModel@240`."""
    name, _, side = name.partition("@")
    part_class = _class_of_part(name)
    if part_class is None and name not in {*SETTINGS, *IMAGE_TEXT, *IMAGE_TEXT.values(), *CLASSES}:
        return find_model(name)
    model_type = IMAGE_TEXT.get(name) or CLASSES.get(name, name)
    config = AutoConfig.for_model(model_type, **SETTINGS.get(model_type, {}))
    if part_class is not None or name in IMAGE_TEXT or name in CLASSES:
        config.architectures = [part_class or name]
    for part in (config, *(one for one in vars(config).values() if isinstance(one, PreTrainedConfig))):
        for field, value in UNDRAWN.items():
            if hasattr(part, field):
                setattr(part, field, _as(getattr(part, field), value))
    if side:
        config.image_size = _as(config.image_size, int(side))
    vision, text = getattr(config, "vision_config", None), text_config(config)
    if getattr(
        vision, "out_hidden_size", None
    ):  # some defaults hand on features that the default text model cannot take
        vision.out_hidden_size = text.hidden_size
    return find_any(config)


def _class_of_part(model_type: str) -> str | None:
    """The class of a type that no automatic class of transformers is for, such as another model's text part: the last in its file, as classes
    with a head come last."""
    if model_type not in CONFIG_MAPPING or any((of := CONFIG_MAPPING[model_type]) in mapping for mapping in AUTOMATIC):
        return None
    module = import_module(of.__module__.replace("configuration_", "modeling_"))
    classes = [cls for cls in vars(module).values() if isinstance(cls, type) and issubclass(cls, PreTrainedModel)]
    return next((cls.__name__ for cls in reversed(classes) if cls.config_class is of), None)


def _as(before: Any, value: Any) -> Any:
    """A value in the form of the one before: of each stage, or a whole number."""
    if isinstance(before, (list, tuple)):
        return type(before)(value for _ in before)
    return int(value) if type(before) is int else value


@lru_cache(maxsize=1)
def find_once(name: str) -> FoundModel:
    """As `find`, for who changes nothing of it."""
    return find(name)


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of a configuration that can be trained with tensor parallelism."""
    config = copy.deepcopy(config)
    for part in (config, text_config(config)):
        for field, value in vars(part).items():
            if ("drop" in field and isinstance(value, float)) or field.endswith("_pdrop"):
                setattr(part, field, 0.0)
    return config
