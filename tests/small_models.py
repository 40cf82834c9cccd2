"""Small models of real architectures for the tests in real processes, and batches for them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY, LENGTH = 132, 16

_COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MAMBA = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "state_size": 16,
    "conv_kernel": 4,
    "expand": 2,
    "pad_token_id": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LINEAR = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "output_router_logits": True}
_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2}
# The first layer of the mixture-of-experts model is dense.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "qwen2": _COMMON,
    # Fewer key-value heads than ranks.
    "qwen2_two_heads": {**_COMMON, "model_type": "qwen2", "num_key_value_heads": 2},
    "phi3_one_head": {**_COMMON, "model_type": "phi3", "num_key_value_heads": 1},
    "qwen3": {**_COMMON, "head_dim": 8},
    "minicpm3": {
        **_COMMON,
        "num_key_value_heads": 8,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "qk_head_dim": 16,
        "head_dim": 8,
    },
    "phi3": _COMMON,
    "gemma3_text": {
        **_COMMON,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
    },
    "mistral": {**_COMMON, "head_dim": 8, "sliding_window": 5},
    "gpt_oss": {
        **_COMMON,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
    },
    "qwen3_moe": {**_COMMON, "head_dim": 8, **_EXPERTS, "mlp_only_layers": [0]},
    "mamba": {**_MAMBA, "time_step_rank": 4},
    "mamba2": {**_MAMBA, "num_heads": 8, "head_dim": 16, "n_groups": 4, "chunk_size": 8},
    # Fused queries, keys and values: thirds, blocks of heads; biases of all heads.
    "mpt": {"d_model": 64, "n_heads": 8, "n_layers": 2, "max_seq_len": 64, **_TOKENS},
    "bloom": {"hidden_size": 64, "n_head": 8, "n_layer": 2, **_TOKENS},
    "codegen": {"n_embd": 64, "n_head": 8, "n_layer": 2, "n_positions": 64, "n_ctx": 64, "rotary_dim": 8, **_TOKENS},
    "falcon": {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2, "alibi": True, **_TOKENS},
    "bamba": {
        **_COMMON,
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_chunk_size": 8,
    },
    "falcon_h1": {
        **_COMMON,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_ssm": 128,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_chunk_size": 8,
        "ssm_multipliers": [0.5, 0.7, 1.1, 1.3, 0.9],
    },
    "minimax": {
        **_COMMON,
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "block_size": 8,
    },
    "qwen3_5_text": {**_COMMON, **_LINEAR, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {
        **_COMMON,
        **_LINEAR,
        **_EXPERTS,
        "head_dim": 8,
        "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "recurrent_gemma": {
        **_COMMON,
        "lru_width": 64,
        "conv1d_width": 4,
        "attention_window_size": 8,
        "block_types": ["recurrent", "attention"],
    },
    "lfm2": {**_COMMON, "layer_types": ["conv", "full_attention"], "block_multiple_of": 16, "full_attn_idxs": [1]},
    # Its cache rounds the widths of keys and values to 64: on each of two ranks they are 64 and 128.
    "xlstm": {"hidden_size": 256, "num_heads": 4, "num_hidden_layers": 2, "chunk_size": 8, **_TOKENS},
    "mixtral": {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 8,
        "vocab_size": VOCABULARY,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}


def small_config(name: str, *, tied: bool = False, **settings: Any) -> Any:
    """The configuration of a reduced model of that type."""
    values = {"model_type": name, **copy.deepcopy(CONFIGS[name]), "tie_word_embeddings": tied, **settings}
    return AutoConfig.for_model(values.pop("model_type"), **values)


def small_model(
    name: str, *, tied: bool = False, dtype: torch.dtype = torch.float32, noise: float = 0.02, **settings: Any
) -> nn.Module:
    """A model in training mode, on every rank the same. Its weights are moved by a little `noise`: parameters that are
    all zero or all one would hide wrong gradients."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(name, tied=tied, **settings)).train()
    if dtype == torch.float64 and {"num_experts", "num_local_experts"} & CONFIGS[name].keys():
        model.set_experts_implementation("eager")  # torch's grouped matrix product takes no float64
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return model.to(dtype)


def meta_model(name: str, *, tied: bool = False, **settings: Any) -> nn.Module:
    """The same architecture on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(small_config(name, tied=tied, **settings)).train()


def batch(*seed: int, rows: int = 2, length: int = LENGTH) -> Tensor:
    """Token ids [rows, length], others for other seeds."""
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    return torch.randint(10, VOCABULARY, (rows, length), generator=generator)


def share_of(mesh: DeviceMesh, axes: Sequence[str] = ("dp_replicate", "dp_shard")) -> tuple[int, int]:
    """Which share of the batch is this rank's, and how many there are: one for each rank of these axes."""
    own, shares = 0, 1
    for axis in axes:
        if axis in (mesh.mesh_dim_names or ()):
            own, shares = own * mesh[axis].size() + mesh.get_local_rank(axis), shares * mesh[axis].size()
    return own, shares


def whole(tensor: Tensor) -> Tensor:
    """A DTensor as the whole tensor, on this rank; a plain tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with whole tensors, detached copies."""
    return {name: whole(value).detach().clone() for name, value in model.state_dict().items()}
