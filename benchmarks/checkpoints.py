"""Checkpoint folders of large models without weights: a configuration, an index and the headers of safetensors files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
QWEN3_235B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}


def shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    """The names and shapes of a checkpoint of Llama or Qwen3-MoE, whose experts are stored one by one."""
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, fewer = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    found = {name: [config["vocab_size"], hidden] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    found["model.norm.weight"] = [hidden]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, width in (("q", heads), ("k", fewer), ("v", fewer)):
            found[f"{layer}.self_attn.{name}_proj.weight"] = [width, hidden]
        found[f"{layer}.self_attn.o_proj.weight"] = [hidden, heads]
        found |= {f"{layer}.{name}_layernorm.weight": [hidden] for name in ("input", "post_attention")}
        width, mlps = config["intermediate_size"], [f"{layer}.mlp"]
        if "num_experts" in config:
            width, mlps = (
                config["moe_intermediate_size"],
                [f"{layer}.mlp.experts.{e}" for e in range(config["num_experts"])],
            )
            found |= {f"{layer}.self_attn.{name}_norm.weight": [head] for name in "qk"}
            found[f"{layer}.mlp.gate.weight"] = [config["num_experts"], hidden]
        for mlp in mlps:
            found |= {f"{mlp}.{name}_proj.weight": [width, hidden] for name in ("gate", "up")}
            found[f"{mlp}.down_proj.weight"] = [hidden, width]
    return found


def write(folder: Path, config: dict[str, Any], *, per_file: int = 400) -> int:
    """Write the files, and return the number of tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    tensors = shapes(config)
    names, placed = list(tensors), {}
    count = -(-len(names) // per_file)
    for number in range(count):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        header, offset = {}, 0
        for name in names[number * per_file : (number + 1) * per_file]:
            size = 2
            for length in tensors[name]:
                size *= length
            header[name] = {"dtype": "BF16", "shape": tensors[name], "data_offsets": [offset, offset + size]}
            placed[name], offset = file, offset + size
        text = json.dumps(header).encode()
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}), "utf-8")
    return len(names)
