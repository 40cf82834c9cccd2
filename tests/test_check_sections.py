"""FSDP units, backends, checkpointing, dropout, mesh axes."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest

from shardplan.compiler.bind import bind
from shardplan.compiler.check import check
from shardplan.compiler.layout.dropout import probabilities
from shardplan.core.diagnostics import Diagnostic, Severity
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import overlays_of
from shardplan.core.tree import ModuleTree
from shardplan.language import parse_text
from tests import examples
from tests.examples import LLAMA, codes, plan, tree
from tests.trees import Builder, with_frozen

HEADER = 'version: "1"\nname: mine\n'
FSDP2 = "data_parallel:\n  backend: fsdp2\n"


def checked(text: str, model: ModuleTree = LLAMA, *, tp: int = 1, **sizes: int) -> tuple[Diagnostic, ...]:
    return examples.checked(HEADER + text, model, tp=tp, **sizes)


def place(finding: Diagnostic, text: str) -> str:
    """The text that a finding points at."""
    span = parse_text(HEADER + text, "mine.yaml").sources.span(finding.primary.location)
    return (HEADER + text).splitlines()[span.line - 1][span.column - 1 : span.end_column - 1]


# FSDP


def test_a_sequential_is_a_unit():
    b = Builder("Net")
    b.add("blocks", "Sequential", "list")
    b.linear("blocks.0", 8, 8)
    assert checked("data_parallel:\n  units: [blocks]\n", b.tree(("Net",), None, {}), dp_shard=2) == ()


def test_without_data_parallel_ranks_what_fsdp_refuses_is_a_warning():
    (finding,) = checked(FSDP2, tree("mixtral-float64-bias"))
    assert (finding.code, finding.severity) == ("SP332", Severity.WARNING)


@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"dp_replicate": 2}, {"cp": 2}])
def test_every_data_axis_counts(sizes: dict[str, int]):
    found = checked(FSDP2, tree("mixtral-float64-bias"), **sizes)
    (finding,) = (one for one in found if one.code == "SP332")
    assert finding.severity is Severity.ERROR


def test_another_backend_has_no_such_rule():
    assert checked("data_parallel:\n  backend: ddp\n  units: [model.layers]\n", dp_replicate=2) == ()


def test_fsdp2_is_the_backend_of_a_section_that_names_none():
    assert codes(checked(FSDP2, tree("mixtral-float64-bias"), dp_shard=2)) == ["SP332"]


@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"dp_replicate": 2}, {"cp": 2}])
def test_data_parallel_ranks_need_a_section(sizes: dict[str, int]):
    assert codes(checked("", **sizes)) == [*(["SP372"] if "cp" in sizes else []), "SP553"]


def test_a_module_that_mixes_dtypes_cannot_be_mended():
    model = tree("mixtral-float64-bias")
    (finding,) = checked("data_parallel:\n  units: [model.layers.*]\n", model, dp_shard=2)
    assert finding.message == (
        "the FSDP unit model.layers.* has parameters of dtypes float32 and float64, but may have only one"
    )
    assert finding.modules == ("model.layers.0.mlp.gate.bias", "model.layers.1.mlp.gate.bias")
    (root,) = checked(FSDP2, model, dp_shard=2)
    assert root.message.startswith("the root's FSDP unit has parameters of dtypes")


@pytest.mark.parametrize("units", ["[model.layers.*]", "[]"])
def test_modules_of_another_dtype_become_units(units: str):
    assert checked(f"data_parallel:\n  units: {units}\n", tree("mixtral-float64-router"), dp_shard=2) == ()


def test_frozen_parameters_may_have_another_dtype():
    model = tree("mixtral-float64-bias")
    modules = {
        name: replace(m, parameters=tuple(replace(p, requires_grad=p.dtype == "float32") for p in m.parameters))
        for name, m in model.modules.items()
    }
    assert codes(checked(FSDP2, model, dp_shard=2)) == ["SP332"]
    assert checked(FSDP2, replace(model, modules=modules), dp_shard=2) == ()


FROZEN = with_frozen(LLAMA, "model.layers.0", "model.norm")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("ignored: [model.norm]", []),
        ("ignored: [model.norm.weight]\n  mixed_precision: {param: float32}", []),
        ("ignored: ['model.layers.0.**', lm_head]", ["SP334"]),
        ("frozen: replicated", []),
        ("frozen: replicated\n  mixed_precision: {param: bfloat16}", ["SP335"]),
        ("ignored: [model.norm]\n  mixed_precision: {param: bfloat16}", ["SP335"]),
    ],
)
def test_what_is_ignored_is_frozen_and_of_the_dtype_that_is_computed_in(words: str, found: list[str]):
    assert codes(checked(f"data_parallel:\n  {words}\n", FROZEN, dp_shard=2)) == found


def test_scalars_are_no_finding_trained_or_frozen():
    trained = tree("mixtral-scalar-gate")
    for scalars in (trained, with_frozen(trained, "model.layers")):
        assert checked(FSDP2, scalars, dp_shard=2) == ()
    assert checked("data_parallel:\n  frozen: replicated\n", scalars, dp_shard=2) == ()


@pytest.mark.parametrize(
    ("to", "sizes", "right"),
    [
        ("3", {"dp_shard": 8}, False),
        ("4", {"dp_shard": 8}, True),
        ("8", {"dp_shard": 4, "dp_replicate": 2}, False),
        ("true", {"dp_shard": 8}, True),
        ("all_but_last", {"dp_shard": 8}, True),
        ("3", {}, True),
    ],
)
def test_resharding_needs_a_divisor(to: str, sizes: dict[str, int], right: bool):
    text = f"data_parallel:\n  reshard_after_forward: {to}\n"
    assert codes(checked(text, **sizes)) == ([] if right else ["SP333"])


def test_resharding_to_a_number_of_ranks_is_not_for_what_tp_splits():
    text = "data_parallel:\n  reshard_after_forward: 2\n"
    rules = "tensor_parallel:\n  lm_head: colwise_gather_output\n"
    assert codes(checked(rules + text, tp=2, dp_shard=4)) == ["SP333"]
    assert checked(rules + text, tp=2, dp_shard=2) == (), "two of two ranks: as true"


def test_an_inherited_field_is_shown_where_it_stands():
    text = "extends: llama\ndata_parallel:\n  reshard_after_forward: 3\n"
    (finding,) = checked(text, dp_shard=8)
    assert place(finding, text) == "3"


# Backends


@pytest.mark.skipif(find_spec("megatron_fsdp") is not None, reason="megatron_fsdp is installed")
def test_a_backend_that_is_not_installed():
    text = "data_parallel:\n  backend: megatron_fsdp\n  units: [model.layers.*]\n"
    (finding,) = checked(text, dp_shard=2)
    assert (finding.code, place(finding, text)) == ("SP551", "megatron_fsdp")
    assert finding.help == "`pip install megatron-fsdp`, or use `backend: fsdp2`"


@pytest.mark.parametrize(
    ("sizes", "right"),
    [
        ({"dp_replicate": 4}, True),
        ({"dp_shard": 2}, False),
        ({"tp": 2}, False),
        ({}, True),
    ],
)
def test_ddp_replicates_only(sizes: dict[str, int], right: bool):
    text = "tensor_parallel:\n  lm_head: colwise_gather_output\ndata_parallel:\n  backend: ddp\n"
    assert codes(checked(text, **sizes)) == ([] if right else ["SP552"])


MEGATRON = "data_parallel:\n  backend: megatron_fsdp\n"
HEADS = "tensor_parallel:\n  lm_head: colwise_gather_output\n  model.layers.*.self_attn.q_norm: replicated_with_grad_allreduce\n"


def besides_missing(text: str, model: ModuleTree = LLAMA, **sizes: int) -> list[str]:
    """The codes, without that of a package that is not installed."""
    return [code for code in codes(checked(text, model, **sizes)) if code != "SP551"]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("units: [model.layers.*]\n  reshard_after_forward: false\n  prefetch: {forward: 1}", []),
        ("units: [model.layers.*]\n  megatron_fsdp: {zero_dp_strategy: optim}", []),
        ("units: [model.layers.0]", ["SP556"]),
        ("megatron_fsdp: {outer_dp_sharding_strategy: optim}", []),
        ("megatron_fsdp: {outer_dp_sharding_strategy: 1, zero_dp_strategy: 2}", ["SP557"]),
        ("megatron_fsdp: {init_model_with_meta_device: true, zero_dp_strategy: no_shard}", ["SP557"]),
        ("mixed_precision: {param: bfloat16}", ["SP554"]),
        ("cpu_offload: true\n  frozen: own\n  ignored: [model.norm]", ["SP554"] * 3),
    ],
)
def test_what_megatron_fsdp_takes(words: str, found: list[str]):
    frozen = with_frozen(LLAMA, "model.norm")
    assert besides_missing(f"{MEGATRON}  {words}\n", frozen, dp_shard=2) == found


def test_fields_of_another_backend_are_errors_at_their_place():
    text = "data_parallel:\n  backend: ddp\n  mixed_precision: {param: bfloat16}\n"
    (finding,) = checked(text, dp_replicate=2)
    assert (finding.code, place(finding, text)) == ("SP554", "{param: bfloat16}")
    for words in ("megatron_fsdp: {nccl_ub: true}", "ddp: {static_graph: true}"):
        assert codes(checked(f"data_parallel:\n  {words}\n", dp_shard=2)) == ["SP554"]
    assert checked("data_parallel:\n  backend: ddp\n  ddp: {static_graph: true}\n", dp_replicate=2) == ()


def test_gradients_that_megatron_fsdp_would_not_sum_are_refused():
    model = tree("qwen3-8b")
    assert besides_missing(HEADS + MEGATRON, model, tp=2, dp_shard=2) == ["SP555"]
    assert besides_missing(HEADS + MEGATRON, model, dp_shard=2) == []
    resolved, _ = bind(plan(HEADER + "extends: llama\n" + MEGATRON), LLAMA, MeshSizes(tp=2), overlays_of(True))
    assert "SP555" in codes(check(resolved))


# Activation checkpointing and compile


def test_checkpointed_modules_are_not_nested():
    text = "activation_checkpointing:\n  modules: [model.layers.*, model.layers.1.mlp]\n"
    (finding,) = checked(text)
    assert finding.message == "model.layers.1.mlp is checkpointed, and so is model.layers.1 around it"
    assert place(finding, text) == "[model.layers.*, model.layers.1.mlp]"
    assert checked("activation_checkpointing:\n  modules: [model.layers.0, model.layers.1.mlp]\n") == ()


def test_compiled_modules_may_be_nested():
    assert checked("compile:\n  modules: [model.layers.*, model.layers.*.mlp]\n") == ()


# Dropout


@pytest.mark.parametrize(
    ("attribute", "value", "counts"),
    [
        ("attention_dropout", 0.1, True),
        ("layerdrop", 1.0, True),
        ("router_jitter_noise", 0.01, True),
        ("attention_dropout", 0.0, False),
        ("drop_tokens", True, False),
        ("num_dropped", 1, False),
        ("eps", 0.1, False),
        ("p", 0.1, False),
    ],
)
def test_attributes_count_as_dropout_by_name_and_value(attribute: str, value: float, counts: bool):
    assert probabilities("other", {attribute: value}) == ({attribute: value} if counts else {})
