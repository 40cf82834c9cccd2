"""What kinds of job are tried: a mesh and a model each, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SMALL = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MOE = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2}


@dataclass(frozen=True)
class Kind:
    """A kind of job.

    Args:
        mesh: the sizes of its axes, for `build_mesh`.
        script: "loop" is the loop of `tests/faults/job.py`; else an example, which gets its words from there.
        hands_over: stages hand values over.
        told: what one rank may not have another of. Ranks that are data-parallel alone may have other batches, of other sizes.
    """

    ranks: int
    mesh: dict[str, int]
    model_type: str = "qwen3"
    config: dict[str, Any] = field(default_factory=dict)
    script: str = "loop"
    hands_over: bool = False
    told: tuple[str, ...] = ("plan", "seed", "batch", "version")

    @property
    def numbers(self) -> dict[str, Any]:
        return {**SMALL, **self.config}


KINDS = {
    "pipeline": Kind(3, {"pp": 3, "dp_shard": 1}, config={"num_hidden_layers": 3}, hands_over=True),
    "experts": Kind(2, {"dp_shard": 2, "ep": 2}, "qwen3_moe", MOE, told=("plan", "version")),
    "cp": Kind(2, {"cp": 2, "dp_shard": 1}, config={"num_hidden_layers": 2}),
    "finetune": Kind(4, {"tp": 2}, config={"num_hidden_layers": 2, "attention_dropout": 0.2}, script="finetune"),
}
