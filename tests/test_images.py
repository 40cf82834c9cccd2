"""Models that see images: their reduced models are run on images, and their plans hold for these too."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import shardplan
from shardplan.compiler.automatic import auto_plan
from shardplan.compiler.bind import bind
from shardplan.compiler.lower import lower
from shardplan.core.mesh import MeshSizes
from shardplan.core.report import Report
from shardplan.language import parse_plan
from shardplan.model.reduced import images
from shardplan.model.reduced.reduced_model import make_reduced_model
from tests.model_settings import find

slow, exhaustive = pytest.mark.slow, pytest.mark.exhaustive
# Class -> (the plan that `auto` finds, the kinds of input, whether it has an overlay).
CLASSES = {
    "Qwen2VLForConditionalGeneration": ("llava", ("text", "image", "video"), True),
    "Qwen2_5_VLForConditionalGeneration": ("llava", ("text", "image", "video"), True),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl", ("text", "image", "video"), True),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe", ("text", "image", "video"), True),
    "LlavaForConditionalGeneration": ("llava", ("text", "image"), True),
    "LlavaNextForConditionalGeneration": ("llava", ("text", "image"), True),
    "LlavaNextVideoForConditionalGeneration": ("llava", ("text", "image", "video"), True),
    "LlavaOnevisionForConditionalGeneration": ("llava", ("text", "image", "video"), True),
    "Mistral3ForConditionalGeneration": ("llava", ("text", "image"), True),
    "Llama4ForConditionalGeneration": ("llama4", ("text", "image"), True),
    "SmolVLMForConditionalGeneration": ("llava", ("text", "image"), True),
    "Gemma3ForConditionalGeneration": ("gemma3", ("text", "image"), True),
}
FAST = ("SmolVLMForConditionalGeneration", "Qwen3VLForConditionalGeneration")
SAMPLE = random.Random(4).sample([name for name in CLASSES if name not in FAST], 2)


def marks(cls: str, tp: int = 2) -> tuple:
    """When a proof of a class runs; reports/image-text-types.json, made by `make zoo`, has all of them."""
    if tp == 2 and cls in FAST:
        return () if cls == FAST[0] else (slow,)
    return (slow,) if (tp == 2 and cls in SAMPLE) or (tp == 4 and cls == SAMPLE[0]) else (exhaustive,)


SOME = pytest.mark.parametrize("cls", [pytest.param(name, marks=marks(name)) for name in CLASSES])
# A tower's own head for classifying images, which these models do not read, and what stands before it.
UNREAD = ("vision_tower.head.", "post_layernorm.")
UNCUT = {"Llama4ForConditionalGeneration": ["SP431"]}  # pipeline stages do not hand on the features that it returns


def folder(cls: str, at: Path) -> str:
    """A folder with a config.json that names the class, as a checkpoint has it."""
    config = find(cls).config
    config.architectures = [cls]
    config.save_pretrained(at)
    return str(at)


def vision(names) -> set[str]:
    """What is outside of the text model."""
    return {name for name in names if not any(part in name for part in ("language_model.", "text_model.", "lm_head"))}


def proven(report: Report) -> None:
    """Everything is equal, with gradients of the vision tower and the projector among it."""
    assert report.proven and report.proof is not None, report
    for variant in report.proof.variants:
        of_images = vision(row.name for row in variant.rows if row.kind == "gradient")
        assert any("vis" in name for name in of_images), "no gradient of the vision tower"


@pytest.mark.parametrize("cls", CLASSES)
def test_the_small_copy_sees_images(cls):
    reduced_model = make_reduced_model(find(cls), tp=2)
    assert reduced_model.kinds == CLASSES[cls][1] and reduced_model.unseen == ""
    last = (
        ("layers.1.",) if getattr(reduced_model.config, "vision_feature_layer", None) == -2 else ()
    )  # the one before is read
    idle = {name for name, _ in reduced_model.build().named_parameters()}
    for kind in reduced_model.kinds[1:]:
        model, inputs = reduced_model.build(), reduced_model.inputs(kind=kind)
        token = getattr(reduced_model.config, f"{kind}_token_id")
        image = inputs["input_ids"] == token
        assert image.any(1).all() and inputs["input_ids"].shape[1] % reduced_model.seq_len == 0
        assert (inputs["labels"][image] == -100).all()
        pixels = next(name for name in inputs if name.startswith("pixel_values"))
        before = model(**{**inputs, pixels: torch.zeros_like(inputs[pixels]) + 0.5}).logits
        output = model(**inputs)
        assert not torch.allclose(before, output.logits), "the pixels are not seen"
        output.loss.backward()
        idle &= {name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0}
    assert not [name for name in vision(idle) if not any(part in name for part in (*UNREAD, *last))]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("cls", FAST)
def test_padding_leaves_the_image_alone(cls, side):
    reduced_model = make_reduced_model(find(cls), tp=2)
    inputs = reduced_model.inputs(kind="image", padding=side)
    image = inputs["input_ids"] == reduced_model.config.image_token_id
    assert (inputs["attention_mask"][image] == 1).all() and not inputs["attention_mask"].all()
    assert reduced_model.build()(**inputs).loss.isfinite()


@SOME
def test_auto_holds_for_a_checkpoint_of_the_class(cls, tmp_path):
    plan, _, overlay = CLASSES[cls]
    report = shardplan.validate(folder(cls, tmp_path), "auto", {"tp": 2})
    assert [one.code for one in report.diagnostics] == UNCUT.get(cls, [])
    assert parse_plan(plan).plan.has_overlay == overlay
    assert type(find(cls).build()).__name__ == cls
    assert auto_plan(find(cls).tree).plan.name == plan


@pytest.mark.parametrize(
    ("cls", "tp"), [pytest.param(cls, tp, marks=marks(cls, tp)) for cls in CLASSES for tp in (2, 4)]
)
def test_the_plan_is_proven(cls, tp, tmp_path):
    proven(shardplan.verify(folder(cls, tmp_path), "auto", {"tp": tp}))


@pytest.mark.parametrize(
    ("cls", "plan"),
    [
        pytest.param("LlavaForConditionalGeneration", "llava_vision", marks=slow),  # CLIP
        pytest.param("SmolVLMForConditionalGeneration", "llava_vision", marks=exhaustive),  # SigLIP
        pytest.param("Gemma3ForConditionalGeneration", "llava_vision", marks=exhaustive),
        pytest.param("LlavaOnevisionForConditionalGeneration", "llava_vision", marks=exhaustive),
        pytest.param("Qwen2VLForConditionalGeneration", "llava_vision", marks=exhaustive),
        pytest.param("Qwen2_5_VLForConditionalGeneration", "llava_vision", marks=exhaustive),
        pytest.param("Qwen3VLForConditionalGeneration", "qwen3_vl_vision", marks=exhaustive),
    ],
)
@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=exhaustive)])
def test_the_tower_may_be_split(cls, plan, tp, tmp_path):
    model = folder(cls, tmp_path)
    assert shardplan.validate(model, plan, {"tp": tp}).diagnostics == ()
    proven(shardplan.verify(model, plan, {"tp": tp}))
    resolved, _ = bind(parse_plan(plan).plan, find(cls).tree, MeshSizes(tp=tp))
    assert any(p.dim is not None for name, m in lower(resolved).modules.items() if "vis" in name for p in m.parameters)


@slow
def test_a_wrong_tower_is_refused(tmp_path):
    """The loss is right; the gradient of the tower's norm is complete on every rank, and would be summed once more."""
    model = folder("LlavaForConditionalGeneration", tmp_path)
    rules = {"model.vision_tower.encoder.layers.*.layer_norm1": "replicated_with_grad_allreduce"}
    plan = {"version": "1", "name": "wrong", "extends": "llava_vision", "tensor_parallel": rules}
    report = shardplan.validate(model, plan, {"tp": 2}, sequence_parallel=False)
    assert {d.code for d in report.diagnostics} == {"SP406"}
    assert all("vision_tower" in d.message for d in report.diagnostics)
    assert not shardplan.verify(model, plan, {"tp": 2}, sequence_parallel=False).ok


def test_sound_reaches_the_audio_tower():
    """Its tokens are those that the model's own features are counted to be, and its layers get gradients."""
    reduced_model = make_reduced_model(find("moss_transcribe_diarize"), tp=2)
    assert (reduced_model.kinds, reduced_model.unseen) == (("text", "audio"), "")
    model, inputs = reduced_model.build(), reduced_model.inputs(kind="audio")
    assert (inputs["input_ids"] == model.config.audio_token_id).sum(1).tolist() == [2, 2]
    model(**inputs).loss.backward()
    assert all(p.grad is not None for p in model.model.audio_tower.layers.parameters())


@pytest.mark.usefixtures("no_repairs")
def test_a_wrong_audio_tower_is_refused():
    rules = {"model.audio_tower.layers.*.final_layer_norm": "replicated_with_grad_allreduce"}
    plan = {"version": "1", "name": "wrong", "extends": "moss_transcribe_diarize", "tensor_parallel": rules}
    report = shardplan.validate("moss_transcribe_diarize", plan, {"tp": 2}, sequence_parallel=False)
    assert {d.code for d in report.diagnostics if d.is_error} == {"SP406"}
    assert all("audio_tower" in d.message for d in report.diagnostics if d.is_error)


def test_images_of_an_unknown_form_are_a_warning(monkeypatch):
    monkeypatch.setattr(images, "RECIPES", tuple(r for r in images.RECIPES if r.names != ("pixel_values",)))
    report = shardplan.validate("fuyu", "auto", {"tp": 2}, sequence_parallel=False)
    assert [(d.code, d.is_error) for d in report.diagnostics] == [("SP407", False)]
    assert "accepts images" in report.diagnostics[0].message and report.diagnostics[0].notes


@slow
@pytest.mark.parametrize("cls", ["LlavaForConditionalGeneration"])
def test_in_real_processes(cls, tmp_path):
    """dp 2 x tp 2 with FSDP2, which wraps the tower's layers too."""
    report = shardplan.verify(folder(cls, tmp_path), "auto", {"tp": 2, "dp_shard": 2}, processes=True)
    proven(report)
    assert set(report.variants) == {"tensor_parallel", "sequence_parallel"}
