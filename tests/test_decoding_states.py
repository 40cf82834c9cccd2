"""Decoding with states that are split: every step's logits, and the tokens, are the unsharded model's."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import batch, small_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig
from transformers.models.rwkv import modeling_rwkv

from shardplan.model import find_any
from shardplan.model.reduced.reduced_model import make_reduced_model
from tests.model_settings import SETTINGS
from tests.proofs import Case, assert_equal

PROMPT, NEW = 6, 5
PLANS = {
    row["name"]: row["plan"]
    for row in json.loads((Path(__file__).parent.parent / "reports" / "model-types.json").read_text("utf-8"))
}
# One of each kind of state is in each run.
KINDS = (
    "mamba",  # channels of a scan and of a convolution
    "mamba2",  # heads of a scan, channels of a convolution of packed parts
    "qwen3_5_text",  # gated delta rule
    "kimi_linear",  # delta rule with a gate for each channel
    "recurrent_gemma",  # real-gated recurrence
    "lfm2",  # short convolution
    "minimax",  # lightning attention
    "xlstm",  # matrix memory
)
OTHERS = (
    *("falcon_mamba", "jamba", "zamba", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"),
    *("olmo_hybrid", "qwen3_5_moe_text", "qwen3_next", "lfm2_moe", "lfm3", "inkling_text", "inkling2_text"),
    *("bailing_hybrid", "zaya", "deepseek_v32", "deepseek_v4", "longcat_flash", "minicpm3", "qwen4_exp_text"),
)
# A cache of transformers asks a layer of attention how long it is, and two defaults have none; 30 heads are divided by no 4.
OTHER = {
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    "olmo_hybrid": {
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 16,
    },
}
RANKS = {"recurrent_gemma": 5}  # of 10 heads


@functools.cache
def _model(name: str, tp: int) -> Callable[[], nn.Module]:
    """Of xLSTM a model of suitable size: its cache rounds the widths of keys and values to 64."""
    if name == "xlstm":
        return functools.partial(small_model, name)
    config = AutoConfig.for_model(name, **{**SETTINGS.get(name, {}), **OTHER.get(name, {})})
    return make_reduced_model(find_any(config), tp=tp, experts_implementation="eager").build


def generated(model: nn.Module, inputs: Mapping[str, Any], **options: Any) -> dict[str, Tensor | None]:
    """The tokens, and the logits of each step. The first reads the prompt, each further one a token for each row."""
    lengths: list[int] = []
    note = model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    found = model.eval().generate(
        **inputs,
        **{"use_cache": True, **options},
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    note.remove()
    cached = options.get("use_cache", True)
    assert lengths == [PROMPT, *([1] * (NEW - 1) if cached else range(PROMPT + 1, PROMPT + NEW))]
    return {"tokens": found.sequences.double(), **{f"logits {i}": step for i, step in enumerate(found.logits)}}


def decoding(name: str, tp: int, *, padded: bool = False, **options: Any) -> Case:
    inputs = {"input_ids": batch(1, length=PROMPT) % 16}
    if padded:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][0, :2] = 0
    call = functools.partial(generated, **options)
    return Case(_model(name, tp), inputs, PLANS[name], tp, torch.no_grad()(call))


@pytest.mark.parametrize("name", [*KINDS, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in OTHERS)])
def test_every_step_is_the_unsharded_models(name: str) -> None:
    rows = decoding(name, 2).rows()
    assert_equal(rows)
    assert [row.name for row in rows] == ["tokens", *(f"logits {i}" for i in range(NEW))]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*KINDS, *OTHERS])
def test_with_more_ranks_beams_and_padding(name: str) -> None:
    """Beams put the rows of a cache into another order; prompts of two lengths are padded at their begin."""
    assert_equal(decoding(name, RANKS.get(name, 4)).rows())
    assert_equal(decoding(name, 2, padded=True).rows())
    if name != "xlstm":  # transformers cannot reorder its cache
        assert_equal(decoding(name, 2, num_beams=2).rows())


@torch.no_grad()
def forgetting(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """Two steps, between which a sharded model loses its states."""
    ids = inputs["input_ids"]
    cache = model.eval()(input_ids=ids[:, :-1], use_cache=True).cache_params
    if isinstance(model.lm_head.weight, DTensor):
        for layer in cache.layers:
            layer.recurrent_states[0].zero_()
    return {"logits": model(input_ids=ids[:, -1:], cache_params=cache, use_cache=True).logits}


def test_a_wrong_state_is_seen() -> None:
    inputs = {"input_ids": batch(1, length=PROMPT) % 16}
    assert "logits" in Case(_model("mamba2", 2), inputs, PLANS["mamba2"], 2, forgetting).wrong()


def test_a_cache_that_has_one_shape_for_all_states_of_rwkv() -> None:
    """Its code makes the states of the split channels as wide as those of the whole hidden state. Without a cache it decodes."""
    code = inspect.getsource(modeling_rwkv.RwkvModel.forward)
    assert "shape = (inputs_embeds.size(0), self.config.hidden_size, self.config.num_hidden_layers)" in code
    with pytest.raises(RuntimeError, match="must match the size"):
        decoding("rwkv", 2).rows()
    assert_equal(decoding("rwkv", 2, use_cache=False).rows())
