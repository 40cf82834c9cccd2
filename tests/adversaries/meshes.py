"""Plain models with their built-in plans on every axis and pair of axes, as they are and as users call them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .adversary import Adversary
from .live import OPTIONS, llama

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}

EAGER = {"experts_implementation": "eager"}  # the others have no float64


def mixtral(**settings: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM._from_config(MixtralConfig(**{**SIZES, "num_local_experts": 4, **settings}), **EAGER)


def qwen3_moe(**settings: Any) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    own = {"num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM._from_config(Qwen3MoeConfig(**{**SIZES, **own, **settings}), **EAGER)


def gpt_oss(**settings: Any) -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    own = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "sliding_window": 4}
    return GptOssForCausalLM._from_config(GptOssConfig(**{**SIZES, **own, **settings}), **EAGER)


def rows(seed: int, padded: str = "", **flags: Any) -> dict[str, Any]:
    """Four rows; each batch leaves out other labels.

    Args:
        padded: "left" or "right": two rows have padding on that side.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 64, (4, 8), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
    labels[:, -1] = ids[:, -1]  # no micro-batch is without a label
    given = {"input_ids": ids, "labels": labels, "use_cache": False, **flags}
    if padded:
        mask = torch.ones_like(ids)
        for row in (0, 3):
            mask[row, slice(0, 3) if padded == "left" else slice(5, 8)] = 0
        given |= {"attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}
    return given


def auxiliary_of(output: Any) -> Tensor:
    """What a mixture adds to the loss for its routers."""
    return 0.001 * output.aux_loss


MESHES: dict[str, Mapping[str, int]] = {
    "dp": {"dp_shard": 2},
    "dp_tp": {"dp_shard": 2, "tp": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "pp": {"pp": 2},
    "pp_tp": {"pp": 2, "tp": 2},
    "pp_dp": {"pp": 2, "dp_shard": 2},
    "ep": {"dp_shard": 2, "ep": 2},
    "ep4": {"dp_shard": 4, "ep": 4},
    "dp_ep": {"dp_shard": 4, "ep": 2},
    "ep_tp": {"tp": 2, "ep": 2},
    "ep_over_tp": {"dp_shard": 2, "tp": 2, "ep": 4},
    "ep_beside_tp": {"dp_shard": 2, "tp": 2, "ep": 2},
    "pp_ep": {"pp": 2, "dp_shard": 2, "ep": 2},
}


def on(
    mesh: str, plan: Any, build: Callable[[], nn.Module], name: str, verdict: Any, why: str, **more: Any
) -> Adversary:
    """A model of transformers with a plan, a built-in one by its name."""
    inputs = more.pop("inputs", rows)
    return Adversary(f"{name}/{mesh}", build, inputs, plan, verdict, why, mesh=MESHES[mesh], **{**OPTIONS, **more})


DENSE = tuple(name for name in MESHES if "ep" not in name)
SPLIT = ("dp_tp", "pp_tp")
CASES = (
    *(on(mesh, "llama", llama, "dense", "right", "as built") for mesh in DENSE),
    *(
        on(mesh, "llama", llama, "dense_sequence", "right", "as built", sequence_parallel=True, max_norm=0.1)
        for mesh in SPLIT
    ),
    *(
        on(mesh, "llama", partial(llama, tie_word_embeddings=True), "dense_tied", "right", "as built", max_norm=0.1)
        for mesh in ("dp_tp", "pp_dp", "pp_tp")
    ),
    *(
        on(mesh, "llama", llama, f"dense_{side}", "right", "rows with padding", inputs=partial(rows, padded=side))
        for mesh, side in (("dp_tp", "left"), ("pp_dp", "left"), ("pp", "right"))
    ),
    *(on(mesh, "mixtral", mixtral, "mixtral", "right", "as built", max_norm=0.1) for mesh in MESHES),
    *(
        on(mesh, model, build, model, "right", "as built")
        for model, build in (("qwen3_moe", qwen3_moe), ("gpt_oss", gpt_oss))
        for mesh in ("ep", "ep_over_tp", "pp_ep", "pp_tp")
    ),
    *(
        on(mesh, "mixtral", mixtral, "mixtral_sequence", "right", "as built", sequence_parallel=True)
        for mesh in ("ep_tp", "ep_over_tp", "ep_beside_tp", "pp_tp")
    ),
)
