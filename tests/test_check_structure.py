"""What structure alone can say: kinds, ties, half-covered parents, block inputs, the sequence. And where it must be
silent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardplan.core.diagnostics import Severity
from shardplan.core.tree import ModuleTree, ParameterInfo
from tests.examples import checked, codes, rules, tree
from tests.trees import Builder, attention, decoder

TIED = decoder(
    family="Llama", model_type="llama", vocab=128, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, width=256,
    tied=True,
)  # fmt: skip


EXPERTS = "model.layers.*.mlp.experts.gate_up_proj: packed_colwise\nmodel.layers.*.mlp.experts.down_proj: rowwise\n"
MLP = "model.layers.*.mlp.{gate,up}_proj: colwise\nmodel.layers.*.mlp.down_proj: rowwise\n"


# Kinds


def test_a_misfit_is_one_finding_for_all_layers():
    (finding,) = checked(rules(MLP + "model.layers.*.{input,post_attention}_layernorm: rowwise"))
    assert finding.code == "SP310"
    assert "model.layers.*.{input_layernorm,post_attention_layernorm} is a norm (RMSNorm)" in finding.message
    assert len(finding.modules) == 4


@pytest.mark.parametrize(
    ("key", "style", "misfits"),
    [
        ("model.embed_tokens", "colwise", True),
        ("lm_head", "embedding_rowwise", True),
        ("model.layers.*.self_attn", "colwise", True),
        ("model.layers", "colwise", True),
        ("model.layers.*.mlp.act_fn", "rowwise", True),
        ("model.layers.*.mlp.act_fn", "sequence_parallel", False),
        ("model.norm", "replicated_with_grad_allreduce", False),
        ("model.layers.*.self_attn", "input_with_grad_allreduce", False),
    ],
)
def test_a_style_knows_its_kinds(key: str, style: str, misfits: bool):
    assert codes(checked(rules(MLP + f"{key}: {style}"))) == (["SP310"] if misfits else [])


def test_conv1d_takes_the_styles_of_a_matrix():
    text = rules("transformer.h.*.mlp.c_fc: colwise\ntransformer.h.*.mlp.c_proj: rowwise\n")
    assert checked(text, tree("gpt2-no-dropout")) == ()
    assert codes(checked(rules("transformer.h.*.mlp.c_fc: colwise_vocab"), tree("gpt2-no-dropout")))[0] == "SP310"


@pytest.mark.parametrize(
    ("parameter", "style", "code"),
    [
        ("model.norm.weight", "colwise", None),
        ("model.norm.weight", "rowwise", "SP312"),
        ("model.norm.weight", "sequence_parallel", "SP311"),
        ("model.norm.weight", "replicate", None),
        ("lm_head.weight", "colwise_vocab", "SP311"),
        ("lm_head.weight", "input_with_grad_allreduce", "SP311"),
    ],
)
def test_a_rule_for_a_parameter_says_its_storage_only(parameter: str, style: str, code: str | None):
    assert codes(checked(rules(MLP + f"{parameter}: {style}"))) == ([code] if code else [])


def test_a_parameter_without_dimensions_cannot_be_split():
    found = checked(rules("model.layers.*.mlp.gate.scale: colwise"), tree("mixtral-scalar-gate"))
    assert "SP312" in codes(found)


# Ties


@pytest.mark.parametrize(
    ("embedding", "head", "alike"),
    [
        ("embedding_rowwise", "colwise_gather_output", True),
        ("embedding_rowwise", "colwise_vocab", True),
        ("embedding_colwise", "rowwise_split_input", True),
        ("replicate", "replicate", True),
        ("embedding_rowwise", "rowwise_split_input", False),
        ("embedding_colwise", "colwise_gather_output", False),
        ("replicate", "colwise_gather_output", False),
        ("replicate", "replicated_with_grad_allreduce", False),
    ],
)
def test_tied_parameters_are_held_alike(embedding: str, head: str, alike: bool):
    text = rules(MLP + f"model.embed_tokens: {embedding}\nlm_head: {head}")
    assert codes(checked(text, TIED)) == ([] if alike else ["SP340"])
    assert checked(text, replace(TIED, tied=())) == ()


def test_a_tie_of_which_one_side_is_split_names_both_rules_and_the_remedy():
    (finding,) = checked(rules(MLP + "model.embed_tokens: embedding_rowwise\nlm_head: replicate"), TIED)
    assert finding.message == (
        "model.embed_tokens.weight and lm_head.weight are one parameter, but the plan stores it in different ways: "
        "split along dim 0, whole"
    )
    assert finding.primary.location.path[-1] == "model.embed_tokens"
    assert [label.location.path[-1] for label in finding.related] == ["lm_head"]
    assert finding.help == "add or change `lm_head: colwise_gather_output`"


def test_a_tie_without_a_rule_for_the_embedding():
    (finding,) = checked(rules(MLP + "lm_head: colwise_gather_output"), TIED)
    assert finding.help == "add or change `model.embed_tokens: embedding_rowwise`"
    assert finding.notes == ("model.embed_tokens.weight: no rule, so it is whole",)


UNITS = "data_parallel:\n  units: [{}]\n"


@pytest.mark.parametrize(
    ("units", "separated"),
    [
        ("model.layers.*", False),
        ("model", True),
        ("lm_head", True),
        ("model.embed_tokens, lm_head", True),
        ("model.layers.*, model.embed_tokens", True),
    ],
)
def test_tied_parameters_share_a_unit(units: str, separated: bool):
    text = rules(MLP + "model.embed_tokens: embedding_rowwise\nlm_head: colwise_vocab") + UNITS.format(units)
    found = checked(text, TIED, dp_shard=2)
    assert codes(found) == (["SP341"] if separated else [])
    assert all(finding.severity is Severity.ERROR for finding in found)
    assert all(finding.severity is Severity.WARNING for finding in checked(text, TIED))
    assert checked(text.replace("units:", "backend: ddp\n  units:"), TIED, tp=1, dp_replicate=2) == ()


# Half-covered parents


def test_a_matrix_that_was_forgotten():
    (finding,) = checked(rules("model.layers.*.mlp.gate_proj: colwise\nmodel.layers.*.mlp.down_proj: rowwise"))
    assert (finding.code, finding.severity) == ("SP350", Severity.WARNING)
    assert finding.modules == ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj")
    assert "`model.layers.*.mlp.up_proj: replicate`" in finding.help


@pytest.mark.parametrize("forgotten", ["gate_proj", "up_proj", "down_proj"])
def test_each_matrix_of_an_mlp_is_missed(forgotten: str):
    styles = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
    del styles[forgotten]
    text = rules("\n".join(f"model.layers.*.mlp.{name}: {style}" for name, style in styles.items()))
    assert codes(checked(text)) == ["SP350"]


@pytest.mark.parametrize("forgotten", ["q", "k", "v", "o"])
def test_each_matrix_of_an_attention_is_missed(forgotten: str):
    kept = [f"model.layers.*.self_attn.{name}_proj: colwise" for name in "qkv" if name != forgotten]
    kept += ["model.layers.*.self_attn.o_proj: rowwise"] if forgotten != "o" else []
    assert codes(checked(rules("\n".join(kept)))) == ["SP350"]


def test_what_is_claimed_is_not_missed():
    text = "model.layers.*.mlp.gate_proj: colwise\nmodel.layers.*.mlp.down_proj: rowwise\n"
    assert checked(rules(text + "model.layers.*.mlp.up_proj: replicate")) == ()


def test_norms_routers_and_whole_blocks_are_not_missed():
    assert checked("qwen3", tree("qwen3-8b")) == ()
    assert checked(rules(MLP)) == (), "the attention is whole as a whole"
    assert checked(rules("model.layers.*.mlp.experts: moe_tp_experts\n" + EXPERTS), tree("mixtral-8x7b")) == ()


def test_heads_that_gather_their_output_keep_to_themselves():
    b = Builder("TwoHeads")
    b.linear("lm_head", 1000, 64)
    b.linear("value_head", 1, 64)
    assert checked(rules("lm_head: colwise_gather_output"), b.tree(("TwoHeads",), None, {})) == ()


def sinks() -> ModuleTree:
    b = Builder("Sinks")
    attention(b, "attn", 64, 4, 4, 16)
    owner = b.modules["attn"]
    b.modules["attn"] = replace(owner, parameters=(ParameterInfo("sinks", (4,)),))
    return b.tree(("Sinks",), None, {})


def test_a_bare_parameter_next_to_split_matrices_is_missed():
    text = "attn.{q,k,v}_proj: colwise\nattn.o_proj: rowwise\n"
    (finding,) = checked(rules(text), sinks())
    assert (finding.code, finding.modules) == ("SP351", ("attn.sinks",))
    assert checked(rules(text + "attn.sinks: colwise"), sinks()) == ()


def test_a_bias_without_a_rule_next_to_its_weight_is_missed():
    text = rules("transformer.h.*.mlp.c_fc.weight: colwise\ntransformer.h.*.mlp.c_proj: rowwise")
    (finding,) = checked(text, tree("gpt2-no-dropout"))
    assert (finding.code, finding.modules[0]) == ("SP351", "transformer.h.0.mlp.c_fc.bias")


def test_a_rule_for_a_bias_alone_does_not_break_the_look_at_its_siblings():
    found = checked(rules("transformer.h.*.mlp.c_fc.bias: colwise"), tree("gpt2-no-dropout"))
    assert codes(found) == ["SP350", "SP351"]


def test_a_replicated_module_claims_what_is_inside():
    b = Builder("Two")
    b.add("block", "Block")
    b.linear("block.inner", 64, 64)
    b.add("block.more", "Block")
    b.linear("block.more.one", 64, 64)
    b.linear("block.more.two", 64, 64)
    model = b.tree(("Two",), None, {})
    assert codes(checked(rules("block.more.one: colwise"), model)) == ["SP350"]
    assert checked(rules("block.more: replicate\nblock.more.one: colwise"), model) == ()


# Block inputs


BLOCK_INPUT = "model.layers.*.mlp: {}\n"


def test_a_door_inside_a_door_is_an_error_where_nothing_between_hands_on_what_it_takes():
    outer = "model.layers.*.mlp: {style: input_with_grad_allreduce, output: all_reduce}\n"
    inner = "model.layers.*.mlp.experts: input_with_grad_allreduce\n"
    (finding,) = checked(rules(outer + inner + EXPERTS), tree("mixtral-8x7b"))
    assert finding.code == "SP363"
    assert [label.location.path[-1] for label in finding.related] == ["model.layers.*.mlp"]
    assert checked(rules(outer + EXPERTS), tree("mixtral-8x7b")) == ()
    moe = inner.replace("input_with_grad_allreduce", "moe_tp_experts")
    assert checked(rules(outer + moe + EXPERTS), tree("mixtral-8x7b")) == (), (
        "it takes what is inside the outer block input"
    )


def test_doors_that_may_be_fed_by_a_rule_between_are_left_to_the_layouts():
    text = "model.layers.*: input_with_grad_allreduce\n" + BLOCK_INPUT.format("input_with_grad_allreduce")
    attn = "model.layers.*.self_attn.{q,k,v}_proj: colwise\nmodel.layers.*.self_attn.o_proj: rowwise\n"
    assert checked(rules(text + attn + MLP)) == (), (
        "o_proj hands on a complete value, which the inner block input may get"
    )


def test_doors_of_different_arguments_do_not_meet():
    options = "argument: hidden_states, output: all_reduce"
    text = f"model.layers.*.mlp: {{style: input_with_grad_allreduce, {options}}}\n"
    inner = "model.layers.*.mlp.act_fn: {style: input_with_grad_allreduce, argument: mask}\n"
    assert checked(rules(text + inner + "lm_head: colwise_gather_output")) == ()


def test_a_sequence_that_nothing_splits_cannot_be_gathered():
    (finding,) = checked(rules(BLOCK_INPUT.format("gather_seq_input") + MLP))
    assert finding.code == "SP364"
    assert codes(checked(rules(MLP.replace("colwise", "colwise_seq")))) == ["SP364"]
    norms = "model.layers.*.input_layernorm: sequence_parallel"
    assert checked(rules(BLOCK_INPUT.format("gather_seq_input") + MLP + norms)) == ()


# The sequence


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_the_overlays_of_built_in_plans_are_sound(name: str):
    model = tree({"llama": "llama-3.1-8b", "mixtral": "mixtral-8x7b"}[name])
    assert checked(name, model, tp=8, sequence_parallel=True, seq_len=8192, dp_shard=2) == ()


def test_a_length_that_does_not_divide_is_refused_with_the_padded_one():
    (finding,) = checked("llama", tp=8, sequence_parallel=True, seq_len=4097)
    assert finding.code == "SP360"
    assert finding.message == "the sequence length is 4097, which tp=8 does not divide"
    assert finding.help == "pad the sequences to 4104 tokens"
    assert checked("llama", tp=8, seq_len=4097) == ()


def test_sequence_parallelism_needs_an_overlay():
    assert codes(checked(rules(MLP), sequence_parallel=True)) == ["SP361"]
    assert checked(rules(MLP), sequence_parallel=True, tp=1) == (), "over one rank it is nothing"


def test_a_partial_embedding_needs_a_door():
    text = 'version: "1"\nname: mine\nextends: llama\nsequence_parallel:\n  model.layers.0: none\n'
    (finding,) = checked(text, sequence_parallel=True)
    assert finding.code == "SP362"
    assert finding.help == "add `model.layers.0: split_seq_input` under `sequence_parallel`"


def test_without_blocks_on_slices_a_partial_embedding_is_reduced_at_once():
    text = rules(MLP, "model.embed_tokens: embedding_rowwise_seq")
    assert checked(text, sequence_parallel=True) == ()
