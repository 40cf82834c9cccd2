"""The plans that mutants are judged by: small ones that use the run-time's lines together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """What `validate` is asked.

    Args:
        model: a model type of transformers; a name for what `own` makes.
        options: of `validate`.
        own: a model and its plan; it is called where the run-time may be imported. None: the plan is `auto`.
    """

    model: str
    mesh: Mapping[str, int] = field(hash=False)
    options: Mapping[str, bool] = field(default_factory=dict, hash=False)
    own: Callable[[], tuple[Any, Any]] | None = None

    @property
    def question(self) -> tuple[Any, Any]:
        """The model and the plan, as `validate` gets them."""
        return self.own() if self.own is not None else (self.model, "auto")

    def __str__(self) -> str:
        mesh = " ".join(f"{axis}{size}" for axis, size in self.mesh.items())
        return " ".join([self.model, mesh, *(name for name, on in self.options.items() if on)])


def shared_norm() -> tuple[Any, Any]:
    """Experts with a norm that all of them share."""
    from shardplan import Model
    from tests.adversaries.mixtures import PLAN, mixture
    from tests.adversaries.parts import features

    return Model(mixture(normed=True), inputs=features), PLAN


def context() -> tuple[Any, Any]:
    """A model whose sequence is split over cp by rules of the plan: attention exchanges heads, or has all keys and values."""
    rules = {
        "model.layers.0": "split_seq_input",
        "model.layers.0.self_attn": "exchange_heads",
        "model.layers.1.self_attn": "replicate_seq",
        "model.norm": "gather_seq_output",
    }
    return "llama", {"version": "1", "name": "context", "extends": "llama", "context_parallel": rules}


SEQUENCE = {"sequence_parallel": True}

# In the order in which they are asked. Meshes with two axes: a mutant has the group of the other one.
CASES = (
    Case("llama", {"dp_shard": 2, "tp": 2}, SEQUENCE),
    Case("llama", {"dp_shard": 2, "tp": 2}),
    Case("gpt2", {"dp_shard": 2, "tp": 2}),
    Case("gemma3_text", {"dp_shard": 2, "tp": 2}),
    Case("olmo2", {"dp_shard": 2, "tp": 2}),
    Case("qwen2", {"tp": 4}),
    Case("mixtral", {"dp_shard": 2, "ep": 2, "tp": 1}),
    Case("mixtral", {"dp_shard": 2, "ep": 4, "tp": 2}),
    Case("mixtral", {"dp_shard": 2, "ep": 2, "tp": 2}, SEQUENCE),
    Case("deepseek_v3", {"dp_shard": 2, "ep": 2, "tp": 2}),
    Case("gpt_oss", {"ep": 2, "tp": 2}),
    Case("shared_norm", {"dp_shard": 2, "ep": 4, "tp": 2}, own=shared_norm),
    Case("mixtral", {"dp_shard": 2, "tp": 2}),
    Case("llama", {"dp_replicate": 2, "dp_shard": 2}),
    Case("context", {"cp": 2, "tp": 2}, own=context),
    Case("llama", {"pp": 2, "tp": 2}),
    Case("qwen3", {"pp": 2, "tp": 2}),
    Case("mixtral", {"pp": 2, "tp": 2}),
    Case("gemma2", {"pp": 2, "tp": 2}),  # with a tie over the stages
    Case("llama", {"pp": 3, "tp": 1}),
    Case("llama", {"pp": 2, "dp_shard": 2, "tp": 1}),
)
