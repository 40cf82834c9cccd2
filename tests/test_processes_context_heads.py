"""`exchange_heads`: every rank of cp computes its share of the heads over all tokens, and all is as in the unsharded model."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from processes import on_ranks
from small_models import batch, small_model
from test_processes_context_axis import AXES, DOCUMENTS, LENGTH, compared, plan_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import shardplan
from shardplan.runtime.parallel import dim_exchange

EAGER = {"attn_implementation": "eager"}
ATTENTION = {"model.layers.*.self_attn": "exchange_heads"}
ROUTER = {**ATTENTION, "model.layers.*.mlp.router": {"style": "token_wise", "read_outside": [0]}}
MIXER = {"backbone.layers.*.mixer": "exchange_heads"}
BACKBONE = {"backbone.layers.0": "split_seq_input", "backbone.norm_f": "gather_seq_output"}
LINEAR = {"model.layers.*.{self_attn,linear_attn}": "exchange_heads"}
BAMBA = {"model.layers.*.{self_attn,mamba}": "exchange_heads"}
BAMBA_ENDS = {"model.layers.0": "split_seq_input", "model.final_layernorm": "gather_seq_output"}
TWO = [
    {"model": "llama", "sizes": (1, 2, 1), "mixers": ATTENTION, "documents": DOCUMENTS, "settings": EAGER},
    {
        "model": "mistral",
        "sizes": (1, 2, 1),
        "mixers": ATTENTION,
        "documents": DOCUMENTS,
        "settings": {"num_key_value_heads": 1},
    },
    {"model": "gemma3_text", "sizes": (1, 2, 1), "mixers": ATTENTION, "padded": True},
    {"model": "gpt_oss", "sizes": (1, 2, 1), "mixers": ROUTER, "settings": EAGER},
    {"model": "minicpm3", "sizes": (1, 2, 1), "mixers": ATTENTION},
    {"model": "mamba2", "sizes": (1, 2, 1), "mixers": MIXER, "ends": BACKBONE, "padded": True},
    {"model": "qwen3_5_text", "plan": "qwen3_5", "sizes": (1, 2, 1), "mixers": LINEAR, "padded": True},
]
FOUR = [
    {"model": "llama", "sizes": (1, 4, 1), "mixers": ATTENTION, "settings": {"num_key_value_heads": 2}},
    {
        "model": "llama",
        "sizes": (1, 2, 2),
        "mixers": ATTENTION,
        "settings": {"num_key_value_heads": 2},
        "options": {"sequence_parallel": True},
    },
    {"model": "phi3_one_head", "plan": "phi3", "sizes": (1, 2, 2), "mixers": ATTENTION, "documents": DOCUMENTS},
    {
        "model": "qwen3",
        "sizes": (2, 2, 1),
        "mixers": ATTENTION,
        "options": {"activation_checkpointing": {"mode": "full"}},
    },
    {
        "model": "gpt_oss",
        "sizes": (1, 2, 2),
        "mixers": ROUTER,
        "settings": EAGER,
        "options": {"sequence_parallel": True},
    },
    {"model": "mamba2", "sizes": (1, 4, 1), "mixers": MIXER, "ends": BACKBONE, "padded": True},
    {"model": "bamba", "sizes": (1, 2, 2), "mixers": BAMBA, "ends": BAMBA_ENDS, "options": {"sequence_parallel": True}},
    {
        "model": "qwen3_5_text",
        "plan": "qwen3_5",
        "sizes": (1, 2, 2),
        "mixers": LINEAR,
        "dtype": torch.float64,  # float32 is at the edge: the terms of A_log's gradient cancel
        "options": {"sequence_parallel": True},
    },
]


def bytes_received(cp: int, heads: int) -> int:
    """By a rank in a forward and a backward, in all exchanges."""
    mesh = init_device_mesh("cpu", (1, cp, 1), mesh_dim_names=AXES)
    model = small_model("llama", num_key_value_heads=heads)
    shardplan.apply_plan(model, mesh, plan_of("llama", ATTENTION), prove=False)
    ids, found, own = batch(0, length=LENGTH), [], mesh.get_local_rank("cp")
    exchange = dim_exchange.all_to_all

    def counted(x: Tensor, received: list[int], *args: Any) -> Tensor:
        found.append((sum(received) - received[own]) * x.element_size())
        return exchange(x, received, *args)

    with patch.object(dim_exchange, "all_to_all", counted):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return sum(found)


def expected_bytes(cp: int, heads: int) -> int:
    """(n - 1) / n of a rank's tokens, for queries and outputs all heads, for keys and values as many as ranks have; and back."""
    tokens, layers, queries, size = 2 * LENGTH // cp, 2, 8, 8
    elements = (cp - 1) * tokens * (2 * queries + 2 * max(heads, cp)) * size // cp
    return 2 * 4 * layers * elements


def refused() -> None:
    """What a rank of cp has only its share of is not asked for."""
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=AXES)
    model = shardplan.apply_plan(small_model("llama", **EAGER), mesh, plan_of("llama", ATTENTION), prove=False)
    ids = batch(0, length=LENGTH)
    with pytest.raises(ValueError, match="output_attentions=True: every rank computes its own heads only"):
        model(input_ids=ids, output_attentions=True)
    with pytest.raises(ValueError, match="apply the plan on a mesh without cp for decoding"):
        with shardplan.without_sequence_parallel(model):
            raise AssertionError("not reached")
    with pytest.raises(RuntimeError, match="numbers of modules whose heads are exchanged over cp differently"):
        model.model(input_ids=ids)
    chunk = torch.randn(2, LENGTH // 2, 64)
    said = {
        r"the code of model.layers.1.self_attn computes with its argument \(add\)": lambda module, args: (args[0] + 0,),
        r"model.layers.1.self_attn.q_proj reads a value of shape \[2, 16, 64\]": lambda module, args: (chunk,),
    }
    for words, hook in said.items():
        whole = small_model("llama")
        whole.model.layers[1].self_attn.q_proj.register_forward_pre_hook(hook)
        changed = shardplan.apply_plan(whole, mesh, plan_of("llama", ATTENTION), prove=False)
        with pytest.raises(RuntimeError, match=words):
            changed(input_ids=ids)


def on_two() -> None:
    for case in TWO:
        compared(case)
    refused()
    assert bytes_received(2, 4) == expected_bytes(2, 4)


def on_four() -> None:
    for case in FOUR:
        compared(case)
    assert bytes_received(4, 2) == expected_bytes(4, 2)


@pytest.mark.slow
def test_shares_of_heads_on_two_ranks() -> None:
    on_ranks(2, on_two, seconds=300)


@pytest.mark.slow
def test_shares_of_heads_on_four_ranks() -> None:
    on_ranks(4, on_four, seconds=400)
