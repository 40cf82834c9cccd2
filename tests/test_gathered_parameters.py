"""Parameters that are stored in shards and read whole go through every room: check, layout, proof, lowering, applying, training
with and without FSDP2, estimate, checkpoints, adapters, and what is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gathered_styles import PLAN, gathered_styles
from peft import LoraConfig, get_peft_model
from processes import on_ranks
from small_models import batch, meta_model, small_model, whole_state
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from training_runs import TWO_BY_TWO, Recipe, compare

import shardplan
from shardplan import Model, applied
from shardplan.compiler.lower.expected_collectives import expected_collectives
from shardplan.core.layout import I, R, V
from tests.collective_counter import CollectiveCounter

SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 132, "head_dim": 8}
SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 4}
QWEN3 = Model("qwen3", settings=SMALL)
NORM, Q_NORM = "model.layers.0.input_layernorm", "model.layers.0.self_attn.q_norm"


def test_it_is_checked_and_proven() -> None:
    with gathered_styles():
        report = shardplan.validate(QWEN3, PLAN, {"tp": 2})
        assert report.ok and not report.diagnostics and report.proof.ok, report.diagnostics
        assert report.stages[-1] == "proof" and report.proof.variants[1].variant == "sequence_parallel"


@pytest.mark.usefixtures("no_repairs")
@pytest.mark.parametrize(
    ("name", "wrong", "code"), [(NORM, "gathered_partial", "SP406"), (Q_NORM, "gathered", "SP401")]
)
def test_a_read_of_the_wrong_type_is_refused(name: str, wrong: str, code: str) -> None:
    plan = {"version": "1", "name": "wrong", "extends": "qwen3", "tensor_parallel": {name.replace(".0.", ".*."): wrong}}
    with gathered_styles():
        report = shardplan.validate(QWEN3, plan, {"tp": 2}, sequence_parallel=False)
    assert [d.code for d in report.diagnostics] == [code]


def test_a_length_that_tp_does_not_divide_is_refused_and_heads_do_not_count() -> None:
    with gathered_styles():
        report = shardplan.validate(
            Model("qwen3", settings=SMALL | {"hidden_size": 66}), PLAN, {"tp": 4}, layouts=False
        )
        assert "SP303" in {d.code for d in report.diagnostics}
        assert shardplan.validate(QWEN3, PLAN, {"tp": 4}, layouts=False).ok  # a norm's 8 features are no heads


def test_the_program_says_both_layouts() -> None:
    with gathered_styles():
        program = shardplan.compile_plan(QWEN3, {"tp": 2}, PLAN)
        shown = program.describe()
    (norm,), (q_norm,) = program.modules[NORM].parameters, program.modules[Q_NORM].parameters
    assert (norm.stored, norm.computed) == (V(0), I) and (q_norm.stored, q_norm.computed) == (V(0), R)
    assert norm.gathered and q_norm.gathered and not q_norm.summed
    assert all(
        program.modules[f"model.layers.{i}"].group is None for i in range(2) if f"model.layers.{i}" in program.modules
    )
    assert "  weight: Shard(0), gathered, gradient complete" in shown


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tp": 2}, TWO_BY_TWO], ids=["tp", "fsdp2"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_it_trains_as_the_unsharded_model(sizes: dict[str, int], sequence_parallel: bool) -> None:
    compare(Recipe("qwen3", sizes, sequence_parallel, plan=PLAN, under=gathered_styles))


def test_the_collectives_are_those_that_are_expected() -> None:
    for counted, expected in on_ranks(2, count):
        assert counted == expected


def count() -> tuple[Any, Any]:
    with gathered_styles():
        model = small_model("qwen3")
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = shardplan.apply_plan(model, mesh, PLAN, prove=False, check_inputs=False)
        stored = model.get_submodule(NORM).weight
        assert isinstance(stored, DTensor) and stored.placements == (Shard(0),) and stored.to_local().numel() == 32
        ids = batch(0)
        with CollectiveCounter() as forward:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        with CollectiveCounter() as backward:
            loss.backward()
        expected = expected_collectives(applied(model).program.modules)
        assert stored.grad.placements == (Shard(0),)
    return {"forward": dict(forward.counts), "backward": dict(backward.counts)}, {
        k: dict(v) for k, v in expected.items()
    }


@pytest.mark.slow
def test_an_estimate_counts_what_is_gathered() -> None:
    step = shardplan.TrainingStep(32, optimizer="sgd", precision="fp32")
    with gathered_styles():
        gathered = shardplan.estimate(QWEN3, PLAN, {"tp": 2}, step)
    plain = shardplan.estimate(QWEN3, "qwen3", {"tp": 2}, step, logits="replicated")
    assert gathered.memory.most["parameters"] < plain.memory.most["parameters"] + 132 * 64 * 4
    calls = {(one.axis, one.collective): one.calls for one in gathered.traffic}
    assert calls["tp", "all_gather"] == 2 * 3 + 1  # three norms of each layer and the head
    assert calls["tp", "reduce_scatter"] == 2  # one for each layer's block, of the gradients that are partial


@pytest.mark.slow
def test_checkpoints_have_the_unsharded_tensors(tmp_path: Path) -> None:
    small_model("qwen3").save_pretrained(tmp_path / "first", max_shard_size="60KB")
    (expected, *others) = on_ranks(2, load_and_save, tmp_path)
    for name, value in small_model("qwen3").state_dict().items():
        assert all(torch.equal(one[name], value) for one in (expected, *others)), name
    again = type(small_model("qwen3")).from_pretrained(tmp_path / "second").state_dict()
    assert all(torch.equal(again[name], value) for name, value in expected.items())


def load_and_save(folder: Path) -> dict[str, torch.Tensor]:
    with gathered_styles():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = shardplan.apply_plan(meta_model("qwen3"), mesh, PLAN, prove=False)
        shardplan.load_checkpoint(model, folder / "first")
        shardplan.save_checkpoint(model, folder / "second")
        return whole_state(model)


def test_adapters_of_a_gathered_layer_are_whole_and_proven() -> None:
    with gathered_styles():
        program = shardplan.compile_plan(adapted(), {"tp": 2}, PLAN)
        (head,) = (m for m in program.modules.values() if m.name.endswith("lm_head"))
        assert {p.name: (p.stored, p.computed) for p in head.parameters} == {
            "base_layer.weight": (V(0), I),
            "lora_A.default.weight": (I, I),
            "lora_B.default.weight": (I, I),
        }
        report = shardplan.validate(adapted(), PLAN, {"tp": 2})
        assert report.ok and report.proof.ok, report.diagnostics


def adapted() -> nn.Module:
    return get_peft_model(small_model("qwen3"), LoraConfig(target_modules=["q_proj", "lm_head"]))


def test_show_says_that_it_is_gathered(capsys: pytest.CaptureFixture[str]) -> None:
    from shardplan.report.program_text import program_text

    with gathered_styles():
        plan = shardplan.load_plan(PLAN)
        text = program_text(shardplan.compile_plan(QWEN3, {"tp": 2}, plan), plan.sources, color=False)
    assert "Shard(0), gathered [32]" in text
