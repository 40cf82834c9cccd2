"""The compiled program of every built-in plan, line by line.

`python -m tests.test_program_golden` writes the files in tests/golden anew; read what it wrote.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from transformers import AutoConfig

from shardplan import compile_plan
from shardplan.core.mesh import MeshSizes
from tests.proofs import PLANS

GOLDEN = Path(__file__).parent / "golden"
# Sizes small enough to read and large enough that every part differs from every other.
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 130,
}
OWN_SIZES = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 8, "vocab_size": 130, "n_positions": 32}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "phi3": SIZES | {"pad_token_id": 0},
    "mixtral": SIZES | {"num_local_experts": 4},
    "qwen3_moe": SIZES | {"num_experts": 4, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
    "gemma3": {"text_config": SIZES, "vision_config": {"num_hidden_layers": 1}},
}
VARIANTS = {f"{plan}-{'sp' if sp else 'tp'}": (plan, sp) for plan in PLANS for sp in (False, True)}


def described(plan: str, sequence_parallel: bool) -> str:
    config = AutoConfig.for_model(plan, **OWN_SIZES.get(plan, SIZES))
    return compile_plan(config, MeshSizes(tp=2), plan, sequence_parallel=sequence_parallel).describe()


@pytest.mark.parametrize("name", VARIANTS)
def test_the_program_is_as_recorded(name):
    plan, sequence_parallel = VARIANTS[name]
    recorded = (GOLDEN / f"{name}.txt").read_text("utf-8")
    assert described(plan, sequence_parallel) == recorded, "python -m tests.test_program_golden writes it anew"


def test_no_recorded_program_is_left_over():
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(VARIANTS)


def test_the_text_tells_programs_apart():
    """Ranks compare a digest of it. (That equal inputs give equal text is the test above, run after run.)"""
    digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in GOLDEN.glob("*.txt")}
    assert len(digests) == len(VARIANTS)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, variant in VARIANTS.items():
        (GOLDEN / f"{name}.txt").write_text(described(*variant), "utf-8")
        print(f"tests/golden/{name}.txt")
