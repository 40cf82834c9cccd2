"""Plans that are found from a model alone."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from sampling import sampled

from shardplan.authoring.init.derive import Derived, derive
from shardplan.compiler.bind import bind
from shardplan.compiler.layout import RecordedModel
from shardplan.compiler.layout.model import ModelLayouts
from shardplan.compiler.layout.solver.channels import cut
from shardplan.compiler.layout.solver.flow import Flow
from shardplan.compiler.layout.solver.lengths import Lengths
from shardplan.compiler.layout.solver.regions import Group, Region, grouped, regions
from shardplan.core.mesh import MeshSizes
from shardplan.language import parse_plan
from shardplan.model import find_any, tree_of
from tests import own_structures as own
from tests.model_settings import find
from tests.soundness.judge import judge, subject

ATTENTION = "model.layers.*.self_attn"


@cache
def flow(name: str) -> Flow:
    recorded = ModelLayouts(find(name), 2).recorded_models[0]
    return Flow(recorded.reference, recorded.tree)


@cache
def derived(name: str) -> Derived:
    return derive(find(name))


def test_a_region_begins_and_ends_within_a_block() -> None:
    """The gate and up matrices read the residual stream, which attention's last matrix and the embedding feed."""
    columns = tuple(f"{ATTENTION}.{x}_proj" for x in "qkv")
    mlp = Region(("model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"), "model.layers.*.mlp.down_proj")
    assert tuple(regions(flow("llama"))) == (Region(columns, f"{ATTENTION}.o_proj"), mlp)


def test_a_latent_is_read_by_another_matrix_too() -> None:
    attention = next(r for r in regions(flow("deepseek_v3")) if r.row.endswith("o_proj"))
    assert attention.latent == (f"{ATTENTION}.kv_a_proj_with_mqa",)
    assert f"{ATTENTION}.q_a_proj" not in attention.columns, "what it gives is normalised before q_b_proj"


def test_experts_go_with_all_that_is_summed_up_with_them() -> None:
    found = grouped(regions(flow("deepseek_v3")), flow("deepseek_v3"))
    group = next(group for group in found if group.container)
    assert group.container == "model.layers.*.mlp"
    assert {row.removeprefix("model.layers.*.mlp.") for row in group.rows} == {
        "down_proj",
        "experts.down_proj",
        "shared_experts.down_proj",
    }


def test_parts_are_read_off_the_slices() -> None:
    found = find_any("phi3", settings={"num_key_value_heads": 8})
    recorded = ModelLayouts(found, 2).recorded_models[0]
    run = Flow(recorded.reference, recorded.tree)
    made = next(p for p in run.products.values() if p.name.endswith("qkv_proj"))
    numbers = recorded.tree.numbers
    heads, shared = numbers["num_attention_heads"], numbers["num_key_value_heads"]
    assert cut(run, made) == tuple(n * numbers["head_dim"] for n in (heads, shared, shared))
    weight = found.tree.modules["model.layers.0.self_attn.qkv_proj"].parameter("weight")
    said = Lengths(recorded.tree, found.tree, recorded.model).packed(run, made, weight.shape[0])
    shared_words = "num_key_value_heads * head_dim"
    assert said == ["num_attention_heads * head_dim", shared_words, shared_words]


def test_parts_are_read_off_what_is_made_of_all_of_a_result() -> None:
    """DBRX clamps it before it is cut."""
    run = flow("dbrx")
    made = next(p for p in run.products.values() if p.name.endswith("Wqkv"))
    numbers = run.tree.numbers
    counts = (numbers["num_attention_heads"], numbers["num_key_value_heads"], numbers["num_key_value_heads"])
    assert cut(run, made) == tuple(n * numbers["head_dim"] for n in counts)


def test_parts_of_a_model_without_a_configuration_are_numbers() -> None:
    model = own.GroupedFused()
    tree = tree_of(model)
    recorded = RecordedModel(model, {"x": torch.randn(2, 8, own.WIDTH)}, tree)
    run = Flow(recorded.reference, tree)
    made = next(p for p in run.products.values() if p.name == "wqkv")
    assert Lengths(tree, tree, model).packed(run, made, sum(cut(run, made))) == ["32", "16", "16"]


def test_slices_that_leave_gaps_are_no_parts() -> None:
    """gpt_oss takes every second feature."""
    made = next(p for p in flow("gpt_oss").products.values() if p.name.endswith("gate_up_proj"))
    assert cut(flow("gpt_oss"), made) == ()


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_what_is_found_for_a_known_model_is_its_plan(name: str) -> None:
    tree = flow(name).tree
    plans = derived(name).draft.plan(), parse_plan(name).plan
    found, known = (bind(plan, tree, MeshSizes(tp=2))[0] for plan in plans)
    assert {n: a.rule.style for n, a in found.assignments.items()} == {
        n: a.rule.style for n, a in known.assignments.items()
    }


def rules(name: str) -> dict[str, str]:
    return {p: o["style"] for p, o in derived(name).draft.tensor_parallel.items()}


@pytest.mark.slow
def test_what_meets_in_halves_has_a_share_of_both() -> None:
    """DiffLlama subtracts heads of its first half from those of its second. A block input says nothing of the lambdas next to it."""
    found = rules("diffllama")
    assert {found[f"{ATTENTION}.{x}_proj"] for x in "qkv"} == {"packed_colwise"}
    assert found[ATTENTION] == "input_with_grad_allreduce"
    assert found[f"{ATTENTION}.lambda_q1"] == "replicated_with_grad_allreduce"


@pytest.mark.slow
def test_numbers_that_only_help_together_are_divided_together() -> None:
    attention = "transformer.blocks.*.norm_attn_norm.attn"
    assert derived("dbrx").draft.tensor_parallel[attention]["shares"] == ["hidden_size", "num_key_value_heads"]


@pytest.mark.slow
def test_a_norm_that_counts_heads_has_a_rank_s_part_of_its_weight() -> None:
    norm = "backbone.blocks.*.mlstm_layer.multihead_norm"
    assert (rules("xlstm")[norm], rules("xlstm")[f"{norm}.weight"]) == ("local_params", "colwise")


@pytest.mark.slow
def test_what_is_small_is_not_gathered() -> None:
    """The indexer of DeepSeek-V3.2."""
    assert "colwise_gather_output" not in {style for name, style in rules("deepseek_v32").items() if "*" in name}
    assert [one.patterns for one in derived("deepseek_v32").whole] == [
        (f"{ATTENTION}.q_a_proj", f"{ATTENTION}.indexer.wq_b")
    ]


@pytest.mark.slow
def test_latents_that_are_wider_than_what_they_are_made_of_are_reduced_there() -> None:
    """Youtu's; DeepSeek-V3's are narrower than its hidden state, though not those of its reduced model."""
    latents = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")
    found = rules("youtu")
    assert found[ATTENTION] == "input_with_grad_allreduce"
    assert {found[f"{ATTENTION}.{name}"] for name in latents} == {"replicated_with_grad_allreduce"}


KNOWN = (
    "gpt2",
    "falcon",
    "moshi",
    "youtu",
    "diffllama",
    "xlstm",
    "phi3",
    "opt",
    "deepseek_v3",
    "gptj",
    "mixtral",
    "cohere2",
    "gpt_neox",
    "stablelm",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(KNOWN, 5, long=["xlstm"]))
def test_what_is_found_is_right(name: str) -> None:
    """Also at a size for which it was not tried."""
    found = derived(name)
    assert not found.whole
    for tp in (2, 4):
        verdict = judge(subject(name, tp), found.draft.plan(), sequence_parallel=False, help=False)
        assert verdict.right and verdict.valid, (tp, verdict)


def test_a_group_lists_what_its_regions_have() -> None:
    one, other = Region(("a",), "b"), Region(("c", "d"), "e", ("c",))
    group = Group((one, other), "x")
    assert (group.columns, group.rows, group.latent) == (("a", "c", "d"), ("b", "e"), ("c",))
