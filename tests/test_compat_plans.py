"""The names of NeMo Automodel and NeMo-RL that concern plans."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from shardplan.compat import (
    get_hf_tp_shard_plan,
    import_class_from_path,
    import_classes_from_paths,
    translate_to_torch_parallel_style,
)
from shardplan.convert import convert_plan
from shardplan.model import find_model
from shardplan.runtime.parallel.single_style import OwnStyle


def said(style: ParallelStyle) -> str:
    return repr(style)


@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("colwise", ColwiseParallel()),
        ("rowwise", RowwiseParallel()),
        ("colwise_rep", ColwiseParallel(output_layouts=Replicate())),
        ("colwise_gather_output", ColwiseParallel(output_layouts=Replicate())),
        ("rowwise_rep", RowwiseParallel(input_layouts=Replicate())),
        ("embedding_rowwise", RowwiseParallel(input_layouts=Replicate())),
        ("sequence_parallel", SequenceParallel()),
        ("replicated_with_grad_allreduce", OwnStyle("replicated_with_grad_allreduce")),
    ],
)
def test_styles_by_name(name: str, style: ParallelStyle) -> None:
    found = translate_to_torch_parallel_style(name)
    assert type(found) is type(style) and said(found) == said(style)
    assert translate_to_torch_parallel_style(name) is not found, "torch writes into the object that it is given"


def test_names_without_a_style() -> None:
    with pytest.raises(ValueError, match="there is no parallel style 'column'"):
        translate_to_torch_parallel_style("column")
    with pytest.raises(ValueError, match="torch has no parallel style for 'packed_colwise'.*apply_plan"):
        translate_to_torch_parallel_style("packed_colwise")
    with pytest.raises(TypeError, match="named by text"):
        translate_to_torch_parallel_style(ColwiseParallel())  # type: ignore[arg-type]


def test_the_plan_of_a_model() -> None:
    model = find_model("qwen3", overrides={"num_hidden_layers": 1}).build()
    plan = get_hf_tp_shard_plan(model)
    theirs = dict(model.tp_plan)
    assert set(plan) == set(theirs)
    assert said(plan["lm_head"]) == said(ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))
    assert said(plan["model.embed_tokens"]) == said(RowwiseParallel(input_layouts=Replicate()))
    assert isinstance(plan["model.layers.*.self_attn.q_norm"], OwnStyle)


def test_levels_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class's plan, the instance's over it, the inner model's under its name; and the embedding where none names it."""
    model = find_model("llama", overrides={"num_hidden_layers": 1}).build()
    inner = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
    monkeypatch.setattr(type(model), "_tp_plan", {"lm_head": "rowwise", "score": "colwise"})
    monkeypatch.setattr(model, "_tp_plan", {"lm_head": "colwise_rep"})
    monkeypatch.setattr(model.model, "_tp_plan", inner)
    found = get_hf_tp_shard_plan(model)
    assert list(found) == ["lm_head", "score", *(f"model.{name}" for name in inner), "model.embed_tokens"]
    assert said(found["lm_head"]) == said(ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))
    assert said(found["model.embed_tokens"]) == said(RowwiseParallel(input_layouts=Replicate()))


def test_no_plan_and_plans_that_torch_cannot_apply() -> None:
    with pytest.raises(ValueError, match="transformers has no tensor-parallel plan for"):
        get_hf_tp_shard_plan(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="transformers has no tensor-parallel plan for"):
        get_hf_tp_shard_plan(find_model("gpt2", overrides={"n_layer": 1}).build())
    with pytest.raises(ValueError, match=r"experts.*apply_plan\(model, mesh, \"hf\"\)"):
        get_hf_tp_shard_plan(find_model("mixtral", overrides={"num_hidden_layers": 1}).build())


def test_such_a_plan_is_converted_again() -> None:
    """Its own class is known, and the head that outputs a DTensor."""
    model = find_model("qwen3", overrides={"num_hidden_layers": 1}).build()
    made = convert_plan(get_hf_tp_shard_plan(model), model=model)
    assert made.ok and "lm_head: colwise_vocab" in str(made.text)


def test_imports_by_path() -> None:
    assert import_class_from_path("torch.optim.AdamW") is torch.optim.AdamW
    assert import_class_from_path(name="torch.nn.Linear") is nn.Linear
    assert import_classes_from_paths(["torch.nn.Linear", "torch.nn.LayerNorm"]) == [nn.Linear, nn.LayerNorm]
    assert import_classes_from_paths(class_paths=[]) == []
    with pytest.raises(ImportError, match="has no NoSuchClass"):
        import_class_from_path("torch.nn.NoSuchClass")
    with pytest.raises(ImportError):
        import_classes_from_paths(["torch.nn.Linear", "no_such_module.Linear"])
    with pytest.raises(ValueError, match="not a dotted path"):
        import_class_from_path("Linear")
