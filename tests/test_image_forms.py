"""Images of every form that models take, made from the configuration alone, and reduced models whose parts still fit each other."""

from __future__ import annotations

import random
import re

import pytest
import torch

from shardplan.model import find_any
from shardplan.model.reduced.reduced_model import make_reduced_model
from tests.model_settings import find

# Type -> the kinds of input of its reduced model.
FORMS = {
    "MllamaForConditionalGeneration": ("text", "image", "cross_attention_states"),  # tiles that cross-attention reads
    "aria": ("text", "image"),  # a table by the number of patches
    "deepseek_vl_hybrid": ("text", "image"),  # two resolutions
    "florence2": ("seq2seq", "image"),  # a pyramid of stages
    "fuyu": ("text", "image"),  # flat patches
    "gemma4": ("text", "image"),  # patches with their columns and rows
    "glm4v": ("text", "image", "video"),  # patches and grids
    "glm5_next": ("text", "image"),  # positions that are selected in groups
    "granite4_vision": ("text", "image"),  # features that go between the layers alone; head counts made from a width
    "idefics": ("image",),  # a mask: the tokens that read a picture
    "inkling2": ("text", "image"),  # what becomes one token, as a picture
    "inkling_mm_model": ("text", "image"),  # patches over several frames
    "instructblip": ("image",),  # a question next to the picture
    "kimi_k25": ("text", "image", "video"),  # square patches
    "kosmos-2": ("image",),  # places without a token
    "kosmos-2.5": ("text", "image"),  # patches after their places
    "minicpmv4_6": ("text", "image", "video"),  # patches in one row
    "molmo2": ("image",),  # layers that are read by their number
    "nemotron_h_omni": ("text", "image"),  # grids without time
    "pix2struct": ("picture",),
    "udop": ("seq2seq", "image"),  # boxes on a page
    "vision-encoder-decoder": ("picture",),
}
FAST = ("kosmos-2", "glm4v", "minicpmv4_6")
SAMPLE = random.Random(58).sample([name for name in FORMS if name not in FAST], 5)


def marks(name: str) -> tuple:
    return () if name in FAST else (pytest.mark.slow,) if name in SAMPLE else (pytest.mark.exhaustive,)


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in FORMS])
def test_images_reach_the_vision_part(name):
    """Other pixels give another loss, and the vision part learns."""
    reduced = make_reduced_model(find(name), tp=2)
    assert reduced.kinds == FORMS[name]
    kind = next(kind for kind in reduced.kinds if kind in ("image", "picture"))
    model, inputs = reduced.build(), reduced.inputs(kind=kind)
    pixels = next(key for key in inputs if key in ("pixel_values", "flattened_patches"))
    with torch.no_grad():
        changed = inputs[pixels].clone()
        changed[..., -1] += 1  # not the places in front of flat patches
        other = model(**{**inputs, pixels: changed}).loss
    loss = model(**inputs).loss
    loss.backward()
    assert loss.isfinite() and not torch.allclose(loss, other)
    vision = {n: p for n, p in model.named_parameters() if re.search("vis|encoder|patch", n) and "decoder" not in n}
    trained = [p for p in vision.values() if p.requires_grad]  # a type may freeze its towers
    assert vision and (not trained or any(p.grad is not None and p.grad.abs().max() > 0 for p in trained))


@pytest.mark.parametrize(
    ("name", "field", "other", "times"),
    [
        ("kimi_k25", "projection_hidden_size", "vision_config.hidden_size", 1),
        ("muse_glimmer", "out_hidden_size", "vision_config.hidden_size", 4),  # four patches are one token
        ("nemotron_h_omni", "vision_hidden_size", "vision_config.hidden_size", 1),
    ],
)
def test_a_width_that_is_another_parts_stays_so(name, field, other, times):
    config = make_reduced_model(find(name), tp=2).config
    part, _, width = other.partition(".")
    assert getattr(config, field) == times * getattr(getattr(config, part), width)


def test_sections_of_frequencies_that_the_code_alone_has_shrink():
    """PaddleOCR's configuration leaves them out; they fill the rotary dims of the reduced heads."""
    reduced = make_reduced_model(find("paddleocr_vl"), tp=2)
    text = reduced.config.get_text_config()
    assert 2 * sum(text.rope_parameters["mrope_section"]) == text.head_dim
    assert "mrope_section" not in find("paddleocr_vl").config.get_text_config().rope_parameters


def test_sections_that_the_code_has_for_each_kind_of_layer_shrink():
    reduced = make_reduced_model(find("cohere_compass_text"), tp=2).config
    assert 2 * sum(reduced.rope_parameters["full_attention"]["mrope_section"]) == reduced.head_dim
    assert "mrope_section" not in find("cohere_compass_text").config.rope_parameters["full_attention"]


@pytest.mark.parametrize("listed", [None, ["Glm46VForConditionalGeneration"]])
def test_a_class_for_several_types_gets_the_whole_configuration(listed):
    config = find("glmga").config
    config.architectures = listed
    found = find_any(config)
    assert found.tree.model_type == "glmga" and any("visual" in name for name in found.tree.modules)
