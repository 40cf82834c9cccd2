"""What users give to a model: each call is equal to the unsharded model's, in every plan that it concerns."""

from __future__ import annotations

import pytest
import torch

from tests.proofs import PLANS, assert_equal, case, reduced_model

MODES = [(False, "plan"), (True, "plan")]
BOTH = pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
SOME = ("llama", "gemma3_text", "phi3", "gpt2", "qwen3_moe")


def embeddings(name: str, tp: int) -> dict:
    inputs = dict(reduced_model(name, tp).inputs())
    shape = (*inputs.pop("input_ids").shape, reduced_model(name, tp).config.get_text_config().hidden_size)
    inputs["inputs_embeds"] = torch.randn(shape, generator=torch.Generator().manual_seed(8))
    return inputs


@BOTH
@pytest.mark.parametrize("name", SOME)
def test_inputs_embeds(name, sp):
    assert_equal(case(name, sp=sp, inputs=embeddings(name, 2)).rows())


@BOTH
def test_the_gradient_of_inputs_embeds(sp):
    """Soft prompts: the vectors themselves are trained, so their gradient must be complete on every rank."""

    def soft(model, inputs):
        vectors = inputs["inputs_embeds"].requires_grad_()
        output = model(**inputs)
        (gradient,) = torch.autograd.grad(output.loss, vectors, retain_graph=True)
        return {"loss": output.loss, "logits": output.logits, "vectors": gradient}

    for name in ("llama", "gpt2"):
        assert_equal(case(name, sp=sp, inputs=embeddings(name, 2), call=soft).rows())


@BOTH
def test_images(sp):
    assert_equal(case("gemma3", sp=sp, kind="image").rows())


@BOTH
@pytest.mark.parametrize(("side", "attn"), [("left", "sdpa"), ("right", "eager")])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2"])
def test_attention_masks_and_implementations(name, side, attn, sp):
    assert_equal(case(name, sp=sp, padding=side, attn=attn).rows())


@BOTH
@pytest.mark.parametrize("name", [name for name in PLANS if name not in ("llama", "gemma3_text", "gpt2")])
def test_attention_masks_in_the_other_plans(name, sp):
    assert_equal(case(name, sp=sp, padding="left").rows())


@BOTH
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2", "phi3"])
def test_position_ids(name, sp):
    inputs = dict(reduced_model(name, 2).inputs())
    length = inputs["input_ids"].shape[1]
    half = torch.arange(length).remainder(length // 2)  # two documents in one row
    inputs["position_ids"] = half.expand(2, -1).clone()
    assert_equal(case(name, sp=sp, inputs=inputs).rows())


@BOTH
def test_one_row_and_long_rows(sp):
    """Any batch and sequence length, if tp divides the length under sequence parallelism."""
    ids = torch.arange(24).remainder(60)[None]
    assert_equal(case("qwen3", sp=sp, inputs={"input_ids": ids, "labels": ids}).rows())


def test_a_length_that_tp_does_not_divide_needs_no_padding_without_sequence_parallelism():
    ids = torch.arange(14).reshape(2, 7)
    assert_equal(case("llama", sp=False, inputs={"input_ids": ids, "labels": ids}).rows())


@BOTH
def test_arguments_by_position(sp):
    def positional(model, inputs):
        output = model(inputs["input_ids"], inputs["attention_mask"], labels=inputs["labels"])
        return {"loss": output.loss, "logits": output.logits}

    assert_equal(case("llama", sp=sp, padding="right", call=positional).rows())


@BOTH
def test_tuples_instead_of_an_output_object(sp):
    def as_tuple(model, inputs):
        loss, logits, *_ = model(**inputs, return_dict=False, use_cache=False)
        return {"loss": loss, "logits": logits}

    for name in ("llama", "gpt2"):
        assert_equal(case(name, sp=sp, call=as_tuple).rows())
