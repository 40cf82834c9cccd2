"""Keys meet names, layers lie over each other, and nothing that does not fit is silent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardplan.compiler.bind import bind
from shardplan.core.diagnostics import Severity
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import ResolvedPlan
from shardplan.core.tree import ModuleTree
from shardplan.language import parse_plan, parse_text
from tests.examples import bound, codes, plan, rules, tree
from tests.trees import llama_8b, with_frozen


def test_every_match_is_assigned_in_the_order_of_the_tree():
    resolved, found = bound(rules("lm_head: colwise_gather_output\nmodel.layers.*.mlp.{up,gate}_proj: colwise"))
    assert found == ()
    assert list(resolved.assignments) == [
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.mlp.up_proj",
        "model.layers.1.mlp.gate_proj",
        "model.layers.1.mlp.up_proj",
        "lm_head",
    ]
    assignment = resolved.assignments["model.layers.1.mlp.up_proj"]
    assert (assignment.rule.style, assignment.section, assignment.is_parameter) == (
        "colwise",
        "tensor_parallel",
        False,
    )


def test_a_key_may_name_parameters():
    resolved, found = bound(rules("model.layers.*.mlp.up_proj.weight: colwise"))
    assert found == ()
    assert list(resolved.parameters) == [f"model.layers.{i}.mlp.up_proj.weight" for i in range(2)]
    assert resolved.modules == {}


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "gpt2", "phi3"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_built_in_plans_bind_without_a_word(name: str, sequence_parallel: bool):
    models = {
        "llama": "llama-3.1-8b",
        "qwen3": "qwen3-8b",
        "mixtral": "mixtral-8x7b",
        "phi3": "phi-3-mini-4k",
    }
    parsed = parse_plan(name)
    resolved, found = bound(parsed.plan, tree(models.get(name, name)), sequence_parallel=sequence_parallel)
    assert found == ()
    assert resolved.assignments and resolved.dp_units


def test_a_base_model_is_addressed_by_the_names_of_the_model_with_a_head():
    resolved, found = bound(parse_plan("llama").plan, llama_8b(layers=1, headless=True))
    assert found == ()
    assert "layers.0.self_attn.q_proj" in resolved.assignments
    assert resolved.dp_units == ("layers.0",)


def test_a_key_that_matches_nothing_is_an_error_with_a_suggestion():
    _, (finding,) = bound(rules("model.layers.*.attn.o_proj: rowwise"))
    assert (finding.code, finding.severity) == ("SP201", Severity.ERROR)
    assert "`model.layers.*.attn.o_proj` matches no module and no parameter of LlamaForCausalLM" in finding.message
    assert "`model.layers.*.self_attn.o_proj`" in finding.help
    assert finding.primary.location.path == ("tensor_parallel", "model.layers.*.attn.o_proj")


def test_an_optional_key_may_match_nothing():
    assert bound(rules("score: {style: colwise_gather_output, optional: true}"))[1] == ()


def test_a_plan_for_a_family_of_models_is_warned_about_its_dead_keys():
    lenient = replace(plan(rules("model.layers.*.mlp.experts: moe_tp_experts")), lenient_dead_rules=True)
    _, (finding,) = bound(lenient)
    assert (finding.code, finding.severity) == ("SP201", Severity.WARNING)


def test_two_rules_that_differ_are_an_error_at_both_lines():
    _, (finding,) = bound(rules("model.layers.*.mlp.*_proj: colwise\nmodel.layers.*.mlp.down_proj: rowwise"))
    assert finding.code == "SP203"
    assert finding.primary.location.path[-1] == "model.layers.*.mlp.down_proj"
    assert [label.location.path[-1] for label in finding.related] == ["model.layers.*.mlp.*_proj"]
    assert finding.modules == ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")


def test_the_order_of_the_lines_decides_nothing():
    _, (finding,) = bound(rules("model.layers.*.mlp.down_proj: rowwise\nmodel.layers.*.mlp.*_proj: colwise"))
    assert finding.code == "SP203"


def test_rules_differ_in_their_options_too():
    _, (finding,) = bound(
        rules("model.layers.0.mlp.up_proj: colwise\nmodel.layers.*.mlp.up_proj: {style: colwise, divides: head_dim}")
    )
    assert finding.code == "SP203"
    assert "divides" in finding.message


def test_the_later_rule_may_override():
    resolved, found = bound(
        rules("model.layers.*.mlp.*_proj: colwise\nmodel.layers.*.mlp.down_proj: {style: rowwise, override: true}")
    )
    assert found == ()
    assert resolved.assignments["model.layers.0.mlp.down_proj"].rule.style == "rowwise"
    assert resolved.assignments["model.layers.0.mlp.up_proj"].rule.style == "colwise"


def test_only_the_later_rule_may_override():
    _, (finding,) = bound(
        rules("model.layers.*.mlp.down_proj: {style: rowwise, override: true}\nmodel.layers.*.mlp.*_proj: colwise")
    )
    assert finding.code == "SP203"


def test_the_same_twice_is_a_warning():
    _, (finding,) = bound(rules("model.layers.*.mlp.{gate,up}_proj: colwise\nmodel.layers.0.mlp.up_proj: colwise"))
    assert (finding.code, finding.severity) == ("SP204", Severity.WARNING)


def test_a_key_that_matches_modules_and_parameters_is_an_error():
    _, (finding,) = bound(rules("model.layers.*.mlp.experts.*: replicate"), tree("mixtral-8x7b"))
    assert finding.code == "SP202"


CHILD = 'version: "1"\nname: mine\nextends: llama\n'


def test_a_child_lies_over_its_parent():
    resolved, found = bound(CHILD + "tensor_parallel:\n  lm_head: colwise_vocab\n")
    assert found == ()
    assert resolved.assignments["lm_head"].rule.style == "colwise_vocab"
    assert resolved.assignments["model.layers.0.mlp.up_proj"].rule.location.file == "plans/llama.yaml"


def test_none_removes_an_inherited_rule():
    resolved, found = bound(CHILD + "tensor_parallel:\n  model.embed_tokens: none\n")
    assert found == ()
    assert "model.embed_tokens" not in resolved.assignments


def test_none_removes_an_inherited_rule_that_matches_nothing():
    inherited = "model.layers.*.mlp.{gate,up}_proj"
    model, others = tree("mixtral-8x7b"), "  model.layers.*.mlp.down_proj: none\n"
    assert codes(bound(CHILD, model)[1]) == ["SP205", "SP201", "SP201"][1:]
    assert bound(CHILD + f"tensor_parallel:\n  {inherited}: none\n{others}", model)[1] == ()


def test_a_misspelled_none_is_dead():
    text = CHILD + "tensor_parallel:\n  model.layers.*.mlp.{gate,upp}_proj_x: none\n"
    assert codes(bound(text)[1]) == ["SP201"]


def test_a_key_stated_again_is_answered_for_there():
    text = CHILD + "tensor_parallel:\n  model.layers.*.mlp.{gate,up}_proj: {style: colwise, optional: true}\n"
    found = bound(text + "  model.layers.*.mlp.down_proj: {style: rowwise, optional: true}\n", tree("mixtral-8x7b"))[1]
    assert found == ()


def test_overlays_lie_over_all_tensor_parallel_rules():
    text = CHILD + "tensor_parallel:\n  model.layers.*.mlp.down_proj: {style: rowwise, divides: head_dim}\n"
    resolved, found = bound(text, sequence_parallel=True)
    assert found == ()
    down = resolved.assignments["model.layers.0.mlp.down_proj"]
    assert (down.rule.style, down.section) == ("rowwise_seq", "sequence_parallel")
    assert resolved.assignments["model.layers.0.mlp.up_proj"].section == "tensor_parallel"


def test_an_overlay_keeps_what_it_does_not_say():
    """Also under another pattern, and a child's over its parent's; a rule of the same section keeps nothing."""
    base = "tensor_parallel:\n  model.layers.*.mlp: {style: input_with_grad_allreduce, shares: [width], fused: false, divides: head_dim}\n"
    over = "sequence_parallel:\n  model.layers.0.mlp: {style: gather_seq_input, shares: []}\n  model.layers.1.mlp: gather_seq_input\n"
    none, kept = (
        bound(CHILD + base + over, sequence_parallel=True)[0].assignments[f"model.layers.{i}.mlp"].rule
        for i in range(2)
    )
    assert (none.style, none.shares, none.fused, none.divides) == ("gather_seq_input", (), False, ("head_dim",))
    assert (kept.divided, kept.fused, kept.divides) == (("width",), False, ("head_dim",))
    both = base + "  model.layers.1.mlp: {style: input_with_grad_allreduce, override: true}\n" + over
    plain = bound(CHILD + both, sequence_parallel=True)[0].assignments["model.layers.1.mlp"].rule
    assert (plain.shares, plain.fused, plain.divides) == ((), True, ())


def test_an_overlay_keeps_how_a_parameter_is_stored():
    base = "tensor_parallel:\n  model.layers.*.mlp.down_proj: {style: packed_rowwise, packed: 4}\n"
    over = "sequence_parallel:\n  model.layers.*.mlp.down_proj: {}\n"
    for style, stored in (
        ("packed_rowwise_seq", 4),
        ("{style: packed_rowwise_seq, packed: 2}", 2),
        ("rowwise_seq", None),
    ):
        resolved, _ = bound(CHILD + base + over.replace("{}", style), sequence_parallel=True)
        assert resolved.assignments["model.layers.0.mlp.down_proj"].rule.packed == stored


def test_a_childs_overlay_lies_over_its_parents():
    text = CHILD + "sequence_parallel:\n  model.norm: {style: sequence_parallel, output: gather, grad: complete}\n"
    resolved, found = bound(text, sequence_parallel=True)
    assert found == ()
    assert resolved.assignments["model.norm"].rule.grad == "complete"


def test_the_overlay_is_not_bound_without_sequence_parallelism():
    text = CHILD + "sequence_parallel:\n  model.norms: sequence_parallel\n"
    assert bound(text)[1] == ()
    assert codes(bound(text, sequence_parallel=True)[1]) == ["SP201"]


def test_a_plan_for_other_models_is_a_warning():
    text = 'version: "1"\nname: mine\nmodels: [qwen3]\n'
    _, (finding,) = bound(text)
    assert (finding.code, finding.severity) == ("SP205", Severity.WARNING)
    assert bound(text.replace("qwen3", "llama"))[1] == ()
    assert bound(text.replace("qwen3", "LlamaForCausalLM"))[1] == ()


def test_models_are_not_inherited():
    assert bound(CHILD, tree("qwen3-8b"))[1] == ()


@pytest.mark.parametrize(
    ("module", "parameter", "agree"),
    [
        ("colwise", "colwise", True),
        ("colwise", "replicate", False),
        ("sequence_parallel", "replicated_with_grad_allreduce", True),
        ("replicate", "replicated_with_grad_allreduce", False),
        ("input_with_grad_allreduce", "rowwise", True),
        ("packed_colwise", "colwise", False),
    ],
)
def test_a_parameters_rule_must_agree_with_its_modules(module: str, parameter: str, agree: bool):
    key = "model.layers.*.mlp.up_proj"
    resolved, found = bound(rules(f"{key}: {module}\n{key}.weight: {parameter}"))
    assert codes(found) == ([] if agree else ["SP206"])
    assert resolved.parameters["model.layers.0.mlp.up_proj.weight"].rule.style == parameter


def test_a_parameters_rule_may_cover_the_bias_alone():
    model = tree("gpt2")
    text = rules("transformer.h.*.mlp.c_proj: rowwise\ntransformer.h.*.mlp.c_proj.bias: replicate")
    assert bound(text, model)[1] == ()
    assert codes(bound(text.replace("rowwise", "colwise"), model)[1]) == ["SP206"]


SECTIONS = """version: "1"
name: mine
data_parallel:
  units: [model.layers.*, lm_head]
activation_checkpointing:
  modules: [model.layers.1]
compile:
  modules: [model.layers.*]
"""


def test_sections_are_expanded_to_modules_in_the_order_of_the_tree():
    resolved, found = bound(SECTIONS)
    assert found == ()
    assert resolved.dp_units == ("model.layers.0", "model.layers.1", "lm_head")
    assert resolved.ac_modules == ("model.layers.1",)
    assert resolved.compile_modules == ("model.layers.0", "model.layers.1")


def test_a_list_stands_for_its_elements():
    text = SECTIONS.replace("[model.layers.*, lm_head]", "[model.layers]").replace("[model.layers.*]", "[model.layers]")
    resolved, found = bound(text)
    assert found == ()
    assert resolved.dp_units == resolved.compile_modules == ("model.layers.0", "model.layers.1")


UNITS = """version: "1"
name: mine
data_parallel:
  units: [model.layers.*]
"""


def units_of(words: str, model: ModuleTree) -> ResolvedPlan:
    resolved, found = bind(plan(UNITS + words), model, MeshSizes(dp_shard=2))
    assert found == ()
    return resolved


def test_where_frozen_modules_go():
    model = with_frozen(llama_8b(layers=2), "model.embed_tokens", "model.layers.0", "model.layers.1.mlp")
    layers = ("model.layers.0", "model.layers.1")
    default = units_of("", model)
    assert (default.dp_units, default.dp_parts, default.dp_ignored) == (layers, (), frozenset())
    own = units_of("  frozen: own\n", model)
    assert (own.dp_units, own.dp_parts) == (layers, ("model.embed_tokens",)), "what a unit holds stays there"
    root = units_of("  frozen: root\n", model)
    assert (root.dp_units, root.dp_parts) == (("model.layers.1",), ())
    whole = units_of("  frozen: replicated\n", model)
    assert (whole.dp_units, whole.dp_parts) == (layers, ())
    assert whole.dp_ignored == {name for name, (_, p) in model.parameters.items() if not p.requires_grad}
    some = units_of("  ignored: [model.embed_tokens, model.layers.0.mlp.up_proj.weight]\n", model)
    assert some.dp_ignored == {"model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"}
    every = units_of("  ignored: [model.layers.0]\n", model)
    assert every.dp_ignored == {name for name in model.parameters if name.startswith("model.layers.0.")}


def test_modules_of_another_dtype_are_units_of_their_own():
    model = tree("mixtral-float64-router")
    gates = ("model.layers.0.mlp.gate", "model.layers.1.mlp.gate")
    assert units_of("", model).dp_parts == gates
    assert units_of("", with_frozen(model, *gates)).dp_parts == ()
    assert units_of("  backend: ddp\n", model).dp_parts == ()


def test_an_ignored_name_that_matches_nothing_is_an_error_at_its_place():
    _, (finding,) = bound(UNITS + "  ignored: [model.nrom]\n")
    assert finding.code == "SP201" and finding.help == "write `model.norm`"
    assert finding.primary.location.path == ("data_parallel", "ignored", 0)


def test_each_nth_module_of_a_pattern():
    text = SECTIONS.replace("[model.layers.1]", "[model.layers.*, 'model.layers.*.mlp']\n  every: 2")
    resolved, found = bound(text)
    assert found == ()
    assert resolved.ac_modules == ("model.layers.1", "model.layers.1.mlp")


def test_sections_without_modules_take_the_units():
    text = SECTIONS.replace("  modules: [model.layers.1]", "  every: 2").replace(
        "  modules: [model.layers.*]", "  fullgraph: true"
    )
    resolved, found = bound(text)
    assert found == ()
    assert (resolved.ac_modules, resolved.compile_modules) == (("model.layers.1",), resolved.dp_units)


def test_sections_are_inherited_field_by_field():
    resolved, found = bound(CHILD + "data_parallel:\n  reshard_after_forward: false\n")
    assert found == ()
    assert resolved.data_parallel.reshard_after_forward is False
    assert resolved.dp_units == ("model.layers.0", "model.layers.1")


@pytest.mark.parametrize("section", ["data_parallel", "activation_checkpointing", "compile"])
def test_a_glob_of_a_section_that_matches_nothing_is_an_error_at_its_place(section: str):
    field = "units" if section == "data_parallel" else "modules"
    text = f'version: "1"\nname: mine\n{section}:\n  {field}: [model.layers.*, model.layer.*]\n'
    _, (finding,) = bound(text)
    assert finding.code == "SP201"
    assert finding.help == "write `model.layers.*`"
    assert finding.primary.location.path == (section, field, 1)
    span = parse_text(text, "mine.yaml").sources.span(finding.primary.location)
    assert text.splitlines()[span.line - 1][span.column - 1 : span.end_column - 1] == "model.layer.*"


def test_sections_want_modules():
    text = rules("").replace("tensor_parallel", "activation_checkpointing")
    text += "  modules: [model.layers.*.mlp.up_proj.weight]\n"
    _, (finding,) = bound(text)
    assert finding.code == "SP207"


def test_all_findings_come_at_once():
    text = rules("lm_heads: colwise\nmodel.layers.*.mlp.*_proj: colwise\nmodel.layers.*.mlp.down_proj: rowwise")
    _, found = bound(text.replace("name: mine", "name: mine\nmodels: [gpt2]") + "compile:\n  modules: [model.h.*]\n")
    assert sorted(codes(found)) == ["SP201", "SP201", "SP203", "SP205"]
