"""The axis cp with adapters, experts on ranks of their own, replicas, checkpoints and accumulated micro-batches, for both ways into a mixer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import on_ranks
from test_processes_context_axis import ATTENTION as WHOLE
from test_processes_context_axis import EXPERTS, START, applied, built, compared, equal_gradients, inputs_of
from test_processes_context_heads import ATTENTION as HEADS
from torch import Tensor

import shardplan
from shardplan.proof.compare import TOLERANCE

LATENTS = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "down_proj"]
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
SP = {"sequence_parallel": True}
TWO = [
    {"model": "minicpm3", "sizes": (1, 2, 1), "mixers": HEADS, "targets": LATENTS},
    {"model": "qwen3_moe", "sizes": (1, 2, 1), "ep": 2, "mixers": {**EXPERTS, **HEADS}, "ends": START},
    {
        "model": "mistral",
        "sizes": (1, 2, 1),
        "mixers": HEADS,
        "ends": START,
        "options": {"activation_checkpointing": {"mode": "selective"}},
    },
]
FOUR = [
    {"model": "llama", "axes": ("dp_replicate", "cp", "tp"), "sizes": (2, 2, 1), "mixers": WHOLE},
    {"model": "llama", "axes": ("dp_replicate", "cp", "tp"), "sizes": (2, 2, 1), "mixers": HEADS, "ends": START},
    {"model": "llama", "sizes": (1, 2, 2), "mixers": HEADS, "targets": LINEAR, "ends": START, "options": SP},
    {"model": "llama", "sizes": (1, 2, 2), "mixers": WHOLE, "targets": LINEAR},
    {"model": "qwen3_moe", "sizes": (1, 2, 2), "ep": 4, "mixers": {**EXPERTS, **HEADS}, "ends": START, "options": SP},
    {"model": "qwen3_moe", "sizes": (1, 2, 2), "ep": 2, "mixers": EXPERTS},
]


def accumulated(case: dict[str, Any], *, loss: str = "model", micro_batches: int = 2) -> None:
    """A step of micro-batches with unequal numbers of labels: the gradients are those of the mean over all of them."""
    model, mesh = applied(case)
    share, shares = mesh.get_local_rank(0), case["sizes"][0]

    def given(i: int) -> dict[str, Tensor]:
        one = inputs_of(case, i)
        one["labels"][:, : 5 * i] = -100
        return one

    def count(one: dict[str, Tensor]) -> int:
        return int((one["labels"][:, 1:] != -100).sum())

    own = [given(share * micro_batches + i) for i in range(micro_batches)]
    words: Any = {"labels": count, "loss": loss} if loss != "model" else {}
    for one, scale in shardplan.micro_batches(model, own, **words):
        with shardplan.context_parallel(model, **one) as inputs:
            (model(**inputs, use_cache=False).loss * scale).backward()

    reference = built(case)
    step = [given(i) for i in range(micro_batches * shares)]
    for one in step:
        (reference(**one, use_cache=False).loss * (count(one) / sum(map(count, step)))).backward()
    equal_gradients(model, reference, TOLERANCE[torch.float32], mesh)


def on_two() -> None:
    for case in TWO:
        compared(case)
    accumulated({"model": "llama", "sizes": (1, 2, 1), "mixers": HEADS, "ends": START})
    accumulated({"model": "llama", "sizes": (1, 2, 1), "mixers": WHOLE}, loss="mean")


def on_four() -> None:
    for case in FOUR:
        compared(case)
    accumulated({"model": "llama", "sizes": (2, 2, 1), "mixers": HEADS})


@pytest.mark.slow
@pytest.mark.proves("cp fsdp2 lora", "cp tokens ep fsdp2", "cp tokens fsdp2 checkpointing")
def test_two_ranks() -> None:
    on_ranks(2, on_two, seconds=300)


@pytest.mark.slow
@pytest.mark.proves(
    "cp hsdp",
    "cp tokens hsdp",
    "tp sp cp tokens fsdp2 lora",
    "tp cp fsdp2 lora",
    "tp sp cp tokens ep fsdp2",
    "tp cp ep fsdp2",
    "cp fsdp2",
)
def test_four_ranks() -> None:
    on_ranks(4, on_four, seconds=400)
