"""The meaning of the fields of model configurations, by their names.

One table for all architectures: role -> the usual names of fields with that role. `role` reads it; shrink.py reduces
each role. Widths under other names, and all numbers of a configuration without usual names, are measured (measured.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Literal

Role = Literal[
    "layers",
    "first_layers",
    "last_layers",
    "sparse_layers",
    "layer_indices",
    "heads",
    "head_dim",
    "scalar",
    "width",
    "share",
    "factor",
    "hidden",
    "vocabulary",
    "token",
    "positions",
    "window",
    "chunk",
    "experts",
    "shared_experts",
    "top_k",
    "selected",
    "pooled",
    "groups",
    "top_groups",
    "state",
    "mamba_heads",
    "mamba_head_dim",
    "mamba_groups",
    "dropout",
    "image",
    "patch",
    "image_tokens",
    "queries",
    "convolutions",
    "codes",
]

Roles = Callable[[str], Role | None]

# A pattern matches a whole name. The first role that matches wins.
NAMES: dict[Role, str] = {
    "dropout": r".*(dropout|dropout_p|drop_rate|pdrop|layerdrop|drop_path_rate|dropout_prob|dropout_rate|jitter_noise|jitter_eps|drop_prob)",
    "token": r".*_(token|tokens)_(id|index|ids)|lang_id"
    r"|(pad|bos|eos|unk|mask|lang|sep|image|image_patch|boi|eoi|audio|video)_(id|index)",
    "layer_indices": r"(mlp_only|moe|rope_scaling|cross_attention)_layers|.*_layer_(ids|indices)"
    r"|(full_attn|fullatt_block|deepstack_visual|global_attn|intermediate_layers)_(idxs|indexes|indices)",
    "first_layers": r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|max_window_layers|n_hash_layers"
    r"|num_hash_layers|n_dense_layers|loop_layer_index_(start|end)",
    "last_layers": r"num_kv_shared_layers",
    "sparse_layers": r"num_sparse_(encoder|decoder)_layers",
    "layers": r"((encoder|decoder)_)?num_hidden_layers|n_layers?|(num_)?(encoder|decoder)_layers"
    r"|num_(layers|blocks|layers_per_stack|global_layers)|depth|num_self_attends_per_block",
    "mamba_heads": r"mamba_n_heads|mamba_num_heads|n_mamba_heads",
    "mamba_head_dim": r"mamba_d_head|mamba_head_dim|mamba_headdim",
    "mamba_groups": r"(mamba_)?n_?groups",
    "heads": r"(.*_)?(attention_heads|key_value_heads|kv_heads|n_heads?|num_heads|key_heads|value_heads)"
    r"|num_query_groups|num_attention_heads_per_layer",
    "head_dim": r"(.*_)?(head_dim|head_size|attention_channels)|kv_channels|d_head|d_kv|dim_head|rotary_dim",
    "scalar": r"query_pre_attn_scalar",
    "hidden": r"hidden_size|d_model",
    "image": r"image_size|image_embedding_size|num_mel_bins",
    "width": r"(.*_)?intermediate_size|num_filters",
    "share": r"coordinate_size|shape_size",
    "vocabulary": r"(.*_)?(vocab_size|vocab|vocab_size_base|vocab_size_per_layer_input)",
    "positions": r"max_position_embeddings|max_seq_len|max_(target|source)_positions|model_max_length"
    r"|context_length|n_ctx",
    "window": r"sliding_window|window_size|local_attention|local_attention_window_len|keep_window_size"
    r"|attention_chunk_size|attention_window_size",
    "chunk": r"chunk_size|mamba_chunk_size|block_size|.*_chunk_length|compress_rates",
    "shared_experts": r"n_shared_experts|(moe_)?num_shared_experts",
    "experts": r"(moe_)?num_experts|n_routed_experts|num_local_experts|zero_expert_num",
    "top_k": r"num_experts_per_tok(en)?|moe_top_?k|top_k_experts",
    "selected": r"index_topk",
    "pooled": r"index_kpool",
    "groups": r"n_group|num_expert_group",
    "top_groups": r"topk_group",
    "state": r"(mamba_d_|ssm_)?state(_size)?|mamba_d_state|time_step_rank|mamba_dt_rank",
    "patch": r"patch_size",
    "image_tokens": r"mm_tokens_per_image",
    "queries": r"num_query_tokens|latent_query_num",
    "convolutions": r"base_channels|latent_channels",
    "codes": r"num_embeddings|codebook_size",
}

# Ids with a meaning other than text: never drawn as text tokens.
SPECIAL = re.compile(r".*(image|boi|eoi|boa|eoa|audio|video|vision|speech).*")


@cache
def role(name: str) -> Role | None:
    """The role of a configuration field, or None where it may stay as it is."""
    return next((role for role, pattern in NAMES.items() if re.fullmatch(pattern, name)), None)
