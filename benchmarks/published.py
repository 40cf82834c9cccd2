"""Published training recipes compared with the bound of the mesh that comes nearest here: `python -m benchmarks.published`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import shardplan
from shardplan.core.estimates import Estimate
from shardplan.report.estimate_text import bytes_text, mesh_text

from .page import table

MIXED = {"mixed_precision": {"param": "bfloat16", "reduce": "float32"}}
STAGES = {"layers": "model.layers.*", "first": ["model.embed_tokens"], "last": ["model.norm", "lm_head"]}
LLAMA = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072}
LLAMA_8B = {
    **LLAMA,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
LLAMA_70B = {
    **LLAMA,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
QWEN = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "vocab_size": 151936,
}
TEXT = """## Recipes and their bounds

`python -m benchmarks.published`: tokens per second and H100 as published, and at most by the bound of the mesh here that comes nearest: parameters in
float32, products in bfloat16, eager. Of the bound's step: the part in which it waits for collectives over tp, cp and ep, and in which ranks of the pipeline wait. Memory is what
`estimate` says without the recipe's own kernels and recomputation.
"""


@dataclass(frozen=True)
class Recipe:
    """A published run, and its nearest configuration here.

    Args:
        published: tokens per second and device.
        micro_batches: of a step, `micro_batch` sequences each.
    """

    published: float
    model: str
    mesh: Mapping[str, int]
    seq_len: int
    micro_batch: int
    micro_batches: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


SELECTIVE, SEQUENCE = {"activation_checkpointing": {"mode": "selective"}}, {"sequence_parallel": True}
RECIPES = {
    "Llama 3.1 8B, torchtitan, 8": Recipe(6667, "llama", {"dp_shard": 8}, 8192, 2, 1, LLAMA_8B, SELECTIVE),
    "Llama 3.1 8B, torchtitan, 128": Recipe(6514, "llama", {"dp_shard": 128}, 8192, 2, 1, LLAMA_8B, SELECTIVE),
    "Llama 3.1 70B, NeMo, 64": Recipe(
        71756 / 64, "llama", {"pp": 4, "dp_shard": 4, "tp": 4}, 8192, 1, 32, LLAMA_70B, SEQUENCE
    ),
    "Llama 3 70B, Megatron Bridge, FP8, 64": Recipe(
        1621, "llama", {"pp": 8, "dp_shard": 2, "tp": 4}, 8192, 1, 128, LLAMA_70B, SEQUENCE
    ),
    "Mixtral 8x7B, Megatron Core, 64": Recipe(5830, "mixtral", {"pp": 4, "dp_shard": 16, "ep": 8}, 4096, 1, 16),
    "Qwen3 30B-A3B, NeMo Automodel, 8": Recipe(12040, "qwen3_moe", {"dp_shard": 8, "ep": 8}, 4096, 4, 16, QWEN),
    "DeepSeek-V3, NeMo Automodel, 256": Recipe(1002, "deepseek_v3", {"pp": 4, "dp_shard": 64, "ep": 64}, 4096, 1, 8),
    "DeepSeek-V3, NeMo Automodel, 1,024": Recipe(865, "deepseek_v3", {"pp": 4, "dp_shard": 256, "ep": 64}, 4096, 1, 32),
    "DeepSeek-V3, DeepSeek, FP8, 2,048 H800": Recipe(
        1543, "deepseek_v3", {"pp": 16, "dp_shard": 128, "ep": 64}, 4096, 1, 128
    ),
}


def bound(recipe: Recipe) -> Estimate:
    staged = {"pipeline_parallel": STAGES} if "pp" in recipe.mesh else {}
    step = shardplan.TrainingStep(
        recipe.seq_len,
        micro_batch=recipe.micro_batch,
        micro_batches=recipe.micro_batches,
        precision="fp32",
        schedule="interleaved" if staged else "1f1b",
    )
    model = shardplan.Model(recipe.model, settings=dict(recipe.settings))
    return shardplan.estimate(
        model, "auto", recipe.mesh, step, device="h100", data_parallel=MIXED, **staged, **recipe.options
    )


def row(name: str, recipe: Recipe) -> tuple[str, ...]:
    one = bound(recipe)
    assert one.bound is not None and one.tokens_per_second is not None
    return (
        name,
        mesh_text(one.sizes),
        f"{recipe.published:,.0f}",
        f"{one.tokens_per_second:,.0f}",
        f"{recipe.published / one.tokens_per_second:.2f}",
        f"{one.bound.waiting / one.bound.seconds:.0%}",
        f"{one.pipeline.bubble:.0%}" if one.pipeline else "",
        bytes_text(one.memory.total),
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(TEXT)
    header = (
        "recipe, devices",
        "mesh here",
        "published",
        "bound",
        "published / bound",
        "collectives",
        "pipeline",
        "memory here",
    )
    rows = []
    for name, recipe in RECIPES.items():
        rows.append(row(name, recipe))
        print(*rows[-1], file=sys.stderr, flush=True)
    print(table(header, rows))


if __name__ == "__main__":
    main()
