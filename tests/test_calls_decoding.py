"""Decoding under tensor parallelism: the unsharded model's tokens."""

from __future__ import annotations

import pytest
import torch

from shardplan.runtime.apply import without_sequence_parallel
from tests.proofs import assert_equal, case, on_ranks, ranked, reduced_model
from tests.simulation import on_every_rank, rank_values, uneven


def steps(model, inputs):
    """A prompt, then two tokens with the cache: the logits of each step."""
    ids = inputs["input_ids"]
    model.eval()
    with torch.no_grad():
        first = model(input_ids=ids[:, :6], use_cache=True)
        second = model(input_ids=ids[:, 6:7], past_key_values=first.past_key_values, use_cache=True)
        third = model(input_ids=ids[:, 7:8], past_key_values=second.past_key_values, use_cache=True)
    return {"logits": first.logits, "second": second.logits, "third": third.logits}


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "gpt2", "mixtral", "gemma3_text"])
def test_decoding_with_a_cache(name):
    rows = case(name, call=steps).rows()
    assert_equal(rows)
    assert [row.name for row in rows] == ["logits", "second", "third"]


def test_decoding_in_a_sequence_parallel_model():
    def decode(model, inputs):
        if not hasattr(model.lm_head.weight, "placements"):
            return steps(model, inputs)
        with without_sequence_parallel(model):
            return steps(model, inputs)

    assert_equal(case("llama", sp=True, call=decode).rows())


def test_a_decoding_step_under_sequence_parallelism_is_refused():
    small = reduced_model("llama", 2)
    inputs = ranked(small.inputs(), 2)
    with on_ranks(model := small.build(), "llama", 2, sequence_parallel=True):
        cache = model(input_ids=inputs["input_ids"], use_cache=True).past_key_values
        with pytest.raises(ValueError, match=r"1.*tp=2.*2"):
            model(input_ids=inputs["input_ids"][:, :1], past_key_values=cache, use_cache=True)


def greedy(model, prompt, new: int):
    """What generate() does without sampling, by the model's calls alone."""
    tokens, cache, ids = [], None, prompt
    for _ in range(new):
        output = model(input_ids=ids, past_key_values=cache, use_cache=True)
        ids, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
        tokens.append(ids)
    return torch.cat(tokens, 1)


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=uneven("gpt2"))])
def test_greedy_tokens(name):
    small = reduced_model(name, 2)
    prompt = small.inputs()["input_ids"][:, :5]
    with torch.no_grad():
        expected = greedy(small.build().eval(), prompt, 6)
        generated = small.build().eval().generate(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        assert generated[:, 5:].equal(expected)
        everywhere = on_every_rank(prompt, 2)
        with on_ranks(model := small.build().eval(), name, 2):
            tokens = greedy(model, everywhere, 6)
    for value in rank_values(tokens).values():
        assert value.equal(expected)
