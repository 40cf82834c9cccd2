"""The meaning of the fields of model configurations, by their names.

One table for all architectures: role -> the names that fields with that role have. `role` reads it; shrink.py
reduces each role.
"""

from __future__ import annotations

import re
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

# A pattern matches a whole name. The first role that matches wins.
NAMES: dict[Role, str] = {
    "dropout": r".*(dropout|dropout_p|drop_rate|pdrop|layerdrop|drop_path|drop_path_rate|dropout_prob)"
    r"|.*(dropout_rate|jitter_noise|jitter_eps|drop_prob)",
    "token": r".*_(token|tokens)_(id|index|ids)|lang_id"
    r"|(pad|bos|eos|unk|mask|lang|sep|image|image_patch|boi|eoi|audio|video)_(id|index)",
    "layer_indices": r"mlp_only_layers|moe_layers|no_rope_layer_ids|full_attn_idxs|hybrid_layer_ids"
    r"|ple_layer_ids|rope_scaling_layers|cross_attention_layers|fullatt_block_indexes|deepstack_visual_indexes|global_attn_indexes|intermediate_layers_indices|dense_layers"
    r"|.*_layer_(ids|idx|idxs|indices|indexes)|attn_layer_indices",
    "first_layers": r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|n_dense_layers"
    r"|max_window_layers|n_hash_layers|num_hash_layers|loop_layer_index_(start|end)",
    "last_layers": r"num_kv_shared_layers",
    "sparse_layers": r"num_sparse_(encoder|decoder)_layers",
    "layers": r"((encoder|decoder)_)?num_hidden_layers|n_layers?|num_layers|layers|(num_)?(encoder|decoder)_layers"
    r"|num_blocks|num_layers_per_stack|depth|num_global_layers|num_self_attends_per_block",
    "mamba_heads": r"mamba_n_heads|mamba_num_heads|n_mamba_heads",
    "mamba_head_dim": r"mamba_d_head|mamba_head_dim|mamba_headdim",
    "mamba_groups": r"(mamba_)?n_?groups",
    "heads": r"(.*_)?(attention_heads|key_value_heads|query_groups|kv_n_heads|kv_heads|n_heads?|num_heads)"
    r"|(.*_)?(key_heads|value_heads|num_query_heads|global_heads)|num_attention_heads_per_layer",
    "head_dim": r"(.*_)?(head_dim|head_size|kv_channels|attention_channels)|qk_head_dim|d_head|d_kv|dim_head"
    r"|rotary_dim",
    "scalar": r"query_pre_attn_scalar",
    "hidden": r"hidden_size|d_model|n_embd|emb_dim|embedding_dim",
    "image": r"image_size|image_embedding_size",
    "width": r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size|hidden_size|lora_rank|embedding_size)"
    r"|(.*_)?(embed_dim|hidden_dim|proj_dim|mid_dim|lowrank|mlp_dim)|(projector|vision)_(input|output)_dim|intermediate_size_mlp|n_inner|d_inner|dff|d_ff"
    r"|dim_ff|lru_width|feed_forward_size|mamba_d_ssm|projection_dim|gated_norm_rank|adapter_rank"
    r"|intra_bottleneck_size|true_hidden_size|adapter_(in|out)_dim|adapter_input_size|laurel_rank|hidden_size_per_layer_input|per_layer_input_dim"
    r"|num_filters|d_latents",
    "share": r"coordinate_size|shape_size",
    "vocabulary": r"(.*_)?(vocab_size|vocab|vocab_size_base|n_words|n_token|vocab_size_per_layer_input)",
    "positions": r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_(target|source)_positions"
    r"|context_length|max_sequence_length|model_max_length",
    "window": r"sliding_window|sliding_window_size|attention_window_size|window_size|local_attention"
    r"|local_attention_window_len|keep_window_size|swa_window_size|attention_chunk_size|attn_window_size",
    "chunk": r"chunk_size|mamba_chunk_size|block_size|.*_chunk_length|compress_rates",
    "shared_experts": r"n_shared_experts|num_shared_experts|moe_num_shared_experts",
    "experts": r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts"
    r"|zero_expert_num",
    "top_k": r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts|num_selected_experts",
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
