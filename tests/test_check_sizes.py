"""What tp must divide, per layer and all at once, and what follows for the sizes that a model allows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardplan.compiler.bind import bind
from shardplan.compiler.check import allowed_tp, check
from shardplan.core.diagnostics import Diagnostic, Severity
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import overlays_of
from shardplan.core.tree import ModuleTree
from shardplan.language import parse_plan
from tests.examples import bound, checked, plan, rules, tree
from tests.trees import Builder, decoder, llama_8b


def allowed(text: str, model: ModuleTree) -> tuple[int, ...]:
    resolved, found = bound(text, model)
    assert found == ()
    return allowed_tp(resolved)


def messages(found: tuple[Diagnostic, ...]) -> list[str]:
    return [f"{finding.code}: {finding.message}" for finding in found]


ATTENTION = rules("model.layers.*.self_attn.{q,k,v}_proj: colwise\nmodel.layers.*.self_attn.o_proj: rowwise")


def test_all_that_does_not_divide_is_said_at_once():
    assert messages(checked("llama", tree("llama-3.1-8b"), tp=3)) == [
        "SP301: num_attention_heads is 32, which tp=3 does not divide",
        "SP301: num_key_value_heads is 8, which tp=3 does not divide",
        "SP303: intermediate_size is 14336, which tp=3 does not divide",
    ]


def test_a_finding_names_the_rule_the_modules_and_the_sizes_that_work():
    _, finding, _ = checked("llama", tree("llama-3.1-8b"), tp=3)
    assert finding.primary.location.path == ("tensor_parallel", "model.layers.*.self_attn.{q,k,v}_proj")
    assert finding.modules[:2] == ("model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj")
    assert len(finding.modules) == 64
    assert finding.help == (
        "use tp 2, 4, 8, 16 or 32: each fits everything that this plan splits; or pad the heads to 36, and those of keys and values "
        "to 9, in the model (2.1% more parameters)"
    )


def test_both_variants_of_a_plan_give_the_same_finding():
    file, model = parse_plan("llama").plan, tree("llama-3.1-8b")
    found = [check(bind(file, model, MeshSizes(tp=3), overlays_of(on))[0], seq_len=4096 * 3) for on in (False, True)]
    assert [d.primary for d in found[0]] == [d.primary for d in found[1]]


def test_more_ranks_than_key_value_heads_is_a_finding_of_its_own():
    assert checked(ATTENTION, tree("llama-3.1-8b"), tp=16) == ()  # two ranks for each
    (finding,) = (d for d in checked(ATTENTION, tree("llama-3.1-8b"), tp=12) if d.code == "SP302")
    assert finding.message == "num_key_value_heads is 8, and tp=12 is not a multiple of it"
    assert "tp 2, 4, 8, 16 or 32" in finding.help


def test_layers_with_other_head_counts_are_checked_each():
    model = llama_8b(layers=4, kv_heads=lambda layer: 8 if layer < 2 else 4)
    found = checked(ATTENTION, model, tp=6)
    assert messages(found)[1:] == [
        "SP301: num_key_value_heads is 8, which tp=6 does not divide",
        "SP302: the number of heads of model.layers.*.self_attn.{k_proj,v_proj} is 4, and tp=6 is not a multiple of it",
    ]
    assert {name.split(".")[2] for name in found[2].modules} == {"2", "3"}
    assert allowed(ATTENTION, model) == (1, 2, 4, 8, 16, 32)


def test_a_gathered_output_is_not_split_into_heads():
    gathered = ATTENTION.replace("colwise", "colwise_gather_output").replace("rowwise", "rowwise_split_input")
    assert 256 in allowed(gathered, tree("llama-3.1-8b"))
    assert checked(gathered, tree("llama-3.1-8b"), tp=64) == ()


def test_a_parameter_of_a_matrix_is_split_like_its_matrix():
    (finding,) = checked(rules("model.layers.*.self_attn.k_proj.weight: colwise"), tree("llama-3.1-8b"), tp=5)[:1]
    assert (finding.code, finding.modules[0]) == ("SP301", "model.layers.0.self_attn.k_proj.weight")


def test_conv1d_is_split_by_its_own_orientation():
    text = rules("transformer.h.*.mlp.c_fc: colwise\ntransformer.h.*.mlp.c_proj: rowwise")
    assert messages(checked(text, tree("gpt2-no-dropout"), tp=5)) == [
        "SP303: the number of output features of transformer.h.*.mlp.c_fc is 3072, which tp=5 does not divide",
        "SP303: the number of input features of transformer.h.*.mlp.c_proj is 3072, which tp=5 does not divide",
    ]


def test_each_packed_part_is_split_on_its_own():
    text = rules("transformer.h.*.attn.c_attn: {style: packed_colwise, packed: 3}")
    # 2304 features divide by 9, but the 12 heads of q, of k and of v do not.
    assert "SP301: num_attention_heads is 12, which tp=9 does not divide" in messages(
        checked(text, tree("gpt2-no-dropout"), tp=9)
    )


def test_packed_parts_may_differ():
    model = grouped_phi()
    parts = "[hidden_size, num_key_value_heads * head_dim, num_key_value_heads * head_dim]"
    text = rules(f"model.layers.*.self_attn.qkv_proj: {{style: packed_colwise, packed: {parts}}}")
    found = [finding for finding in checked(text, model, tp=12) if finding.severity is Severity.ERROR]
    assert "SP302: num_key_value_heads is 8, and tp=12 is not a multiple of it" in messages(tuple(found))
    assert allowed(text, model) == (1, 2, 4, 8, 16, 32)


def grouped_phi() -> ModuleTree:
    """One layer of a Phi-3 with 32 heads and 8 key-value heads of 128 features."""
    b = Builder("Phi3ForCausalLM")
    b.add("model", "Phi3Model")
    b.add("model.layers", "ModuleList", "list")
    b.add("model.layers.0", "Phi3DecoderLayer")
    b.add("model.layers.0.self_attn", "Phi3Attention", head_dim=128)
    b.linear("model.layers.0.self_attn.o_proj", 4096, 4096)
    b.linear("model.layers.0.self_attn.qkv_proj", 4096 + 2 * 1024, 4096)
    numbers = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    return b.tree(("Phi3ForCausalLM",), "phi3", numbers)


def test_the_width_of_experts_must_divide():
    found = checked("mixtral", tree("mixtral-8x7b"), tp=3)
    assert "SP303: intermediate_size is 14336, which tp=3 does not divide" in messages(found)
    wide = next(finding for finding in found if finding.code == "SP303")
    assert {name.rpartition(".")[2] for name in wide.modules} == {"gate_up_proj", "down_proj"}


def test_latent_attention_has_two_sizes_of_heads():
    b = Builder("DeepseekV3ForCausalLM")
    b.add("layers", "ModuleList", "list")
    b.add("layers.0", "Layer")
    b.add("layers.0.self_attn", "Attention", num_heads=20, qk_head_dim=256, v_head_dim=256, kv_lora_rank=512)
    b.linear("layers.0.self_attn.q_a_proj", 768, 2048)
    b.linear("layers.0.self_attn.q_b_proj", 20 * 256, 768)
    b.linear("layers.0.self_attn.kv_b_proj", 20 * 448, 512)
    b.linear("layers.0.self_attn.o_proj", 2048, 20 * 256)
    model = b.tree(("DeepseekV3ForCausalLM",), "deepseek_v3", {"num_attention_heads": 20, "num_key_value_heads": 20})
    text = rules("layers.*.self_attn.{q,kv}_b_proj: colwise\nlayers.*.self_attn.o_proj: rowwise")
    # 8960 features of kv_b are 35 times 256, but they are 20 heads of 448: no head count is read into them.
    assert allowed(text, model) == (1, 2, 4, 5, 10, 20)
    assert checked(text, model, tp=4) == (), "the first half of the low-rank projection may be whole"


def test_a_gate_has_one_feature_for_each_head():
    b = Builder("LagunaForCausalLM")
    b.add("layers", "ModuleList", "list")
    b.add("layers.0", "Layer")
    b.add("layers.0.self_attn", "Attention", num_heads=8, head_dim=8)
    b.linear("layers.0.self_attn.g_proj", 8, 32)
    b.linear("layers.0.self_attn.q_proj", 64, 32)
    b.linear("layers.0.self_attn.o_proj", 32, 64)
    numbers = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    model = b.tree(("LagunaForCausalLM",), "laguna", numbers)
    text = rules("layers.*.self_attn.{q,g}_proj: colwise\nlayers.*.self_attn.o_proj: rowwise")
    assert allowed(text, model) == (1, 2, 4, 8), "8 gates of 8 heads, not one head of 8 features"


def test_a_declared_number_must_divide():
    text = rules("lm_head: {style: colwise_gather_output, divides: [num_hidden_layers, head_dim // 2]}")
    assert messages(checked(text, tree("qwen3-8b"), tp=8)) == [
        "SP305: num_hidden_layers is 36, which tp=8 does not divide"
    ]
    assert allowed(text, tree("qwen3-8b")) == (1, 2, 4)


def test_an_attribute_to_divide_must_divide():
    text = rules("model.layers.*.mlp: {style: input_with_grad_allreduce, shares: [config.num_hidden_layers]}")
    text += "  model.layers.*.mlp.{gate,up}_proj: colwise\n  model.layers.*.mlp.down_proj: rowwise\n"
    (finding,) = checked(text, tree("qwen3-8b"), tp=8)
    assert finding.message == "config.num_hidden_layers of model.layers.*.mlp is 36, which tp=8 does not divide"
    assert len(finding.modules) == 36


def test_a_count_that_is_reported_with_its_split_is_not_reported_again():
    assert [finding.code for finding in checked("phi3", tree("phi-3-mini-4k"), tp=3)] == ["SP301", "SP303"]


def test_an_attribute_must_be_there_and_a_number():
    text = rules("transformer.h.*.attn: {style: input_with_grad_allreduce, shares: [heads, config.n_heads]}")
    model = tree("gpt2-no-dropout")
    assert messages(checked(text, model, tp=None)) == [
        "SP306: `shares` does not fit for transformer.h.*.attn: GPT2Attention has no number heads",
        "SP306: `shares` does not fit for transformer.h.*.attn: the configuration has no number n_heads",
    ]


def test_a_nested_config_may_have_the_number():
    model = replace(tree("llama-3.1-8b"), numbers={"vision_config.depth": 3})
    text = rules("lm_head: {style: colwise_gather_output, shares: [config.depth]}")
    assert messages(checked(text, model, tp=2)) == ["SP306: config.depth of lm_head is 3, which tp=2 does not divide"]
    two = replace(model, numbers={"vision_config.depth": 3, "audio_config.depth": 5})
    assert checked(text, two, tp=2) == ()


@pytest.mark.parametrize("packed", ["5", "[hidden_size, 1]", "[hidden_size, hidden_size, unknown]"])
def test_packed_parts_must_add_up(packed: str):
    text = rules(f"transformer.h.*.attn.c_attn: {{style: packed_colwise, packed: {packed}}}")
    text += "  transformer.h.*.attn.c_proj: rowwise\n"
    assert {finding.code for finding in checked(text, tree("gpt2-no-dropout"), tp=None)} == {"SP304"}


def test_without_a_size_the_smallest_allowed_one_is_checked():
    found = checked("llama", tree("smollm2-135m"), tp=None)
    assert found == (), "9 heads, 3 key-value heads: tp 3"
    uneven = checked(
        rules("model.embed_tokens: embedding_rowwise\nlm_head: colwise_gather_output"), odd_vocabulary(), tp=None
    )
    assert [finding.code for finding in uneven] == ["SP320"]
    assert "tp=2" in uneven[0].message


def odd_vocabulary(rows: int = 50257) -> ModuleTree:
    return decoder(
        family="Llama",
        model_type="llama",
        vocab=rows,
        hidden=64,
        layers=1,
        heads=4,
        kv_heads=4,
        head_dim=16,
        width=256,
    )


def test_no_allowed_size_is_an_error_that_names_the_odd_one():
    model = llama_8b(layers=1, heads=31, kv_heads=1)
    (finding,) = checked("llama", model, tp=None)
    assert messages((finding,)) == [
        (
            "SP307: no tp size above 1 divides everything that this plan splits: num_attention_heads 31 "
            "and intermediate_size 14336"
        )
    ]
    assert "leave" in finding.help or "split less" in finding.help
    assert allowed("llama", model) == (1,)


def test_one_key_value_head_limits_nothing():
    assert allowed("llama", llama_8b(layers=1, kv_heads=1)) == (1, 2, 4, 8, 16, 32)


def test_a_size_of_1_is_always_right():
    assert checked("llama", llama_8b(layers=1, kv_heads=1), tp=1) == ()
    assert checked("gpt2", tree("gpt2"), tp=1) == ()


def test_a_plan_that_splits_nothing_allows_1():
    text = rules("model.norm: replicate")
    assert allowed(text, tree("llama-3.1-8b")) == (1,)
    assert checked(text, tree("llama-3.1-8b"), tp=None) == ()
    assert [finding.code for finding in checked(text, tree("llama-3.1-8b"), tp=2)] == ["SP309"]


def test_a_vocabulary_alone_sets_no_limit_but_its_rows():
    text = rules("model.embed_tokens: embedding_rowwise")
    assert allowed(text, tree("llama-3.1-8b")) == (1, 2, 4, 8, 16, 32, 64)
    assert allowed(text, odd_vocabulary(rows=10)) == (1, 2, 4)


def test_an_uneven_vocabulary_is_a_warning_that_says_how_the_ranks_are_filled():
    (finding,) = checked("gpt2", tree("gpt2-no-dropout"), tp=4)
    assert (finding.code, finding.severity) == ("SP320", Severity.WARNING)
    assert finding.message == (
        "tp=4 does not divide a vocabulary of 50257 rows: the ranks get 12565, 12565, 12565 and 12562 rows"
    )
    assert finding.modules == ("transformer.wte", "lm_head")


def test_a_vocabulary_that_leaves_a_rank_empty_is_an_error():
    (finding,) = checked(rules("model.embed_tokens: embedding_rowwise"), odd_vocabulary(rows=9), tp=4)
    assert (finding.code, finding.severity) == ("SP321", Severity.ERROR)
    assert finding.message == "a vocabulary of 9 rows leaves rank 3 of tp=4 without a row"


def test_a_small_head_is_no_vocabulary():
    b = Builder("LlamaForSequenceClassification")
    b.linear("score", 2, 4096)
    model = b.tree(("LlamaForSequenceClassification",), "llama", {"vocab_size": 128256})
    (finding,) = checked(rules("score: colwise_gather_output"), model, tp=4)
    assert finding.code == "SP303"


def test_a_module_without_a_configuration_has_none_to_divide():
    model = tree("llama-3.1-8b")
    modules = {name: replace(module, config={}) for name, module in model.modules.items()}
    text = rules("model.layers.*.mlp.{gate,up}_proj: {style: colwise, shares: [config.num_attention_heads]}")
    found = messages(checked(text, replace(model, modules=modules), tp=2))
    assert "Linear, which has no configuration, has no number num_attention_heads" in found[0]


EXCHANGED = rules("model.layers.*.self_attn.{q,k,v}_proj: colwise\nmodel.layers.*.self_attn.o_proj: rowwise") + (
    "context_parallel:\n  model.layers.0: split_seq_input\n  model.layers.*.self_attn: exchange_heads\n"
)


@pytest.mark.parametrize(
    ("tp", "cp", "found"),
    [
        (1, 4, []),
        (2, 16, []),  # each key-value head is on four ranks
        (1, 3, ["num_attention_heads is 32 and num_key_value_heads is 8"]),
        (2, 32, ["num_attention_heads is 32"]),
        (3, 2, []),  # tp alone is refused
    ],
)
def test_ranks_of_both_axes_divide_the_heads_that_are_exchanged_over_cp(tp: int, cp: int, found: list[str]):
    on = overlays_of(False, MeshSizes(cp=cp), context=True)
    resolved, _ = bind(plan(EXCHANGED), tree("llama-3.1-8b"), MeshSizes(tp=tp, cp=cp), on)
    about = [one for one in check(resolved) if one.code == "SP369"]
    assert [one.message.partition(": ")[2] for one in about] == found
    assert all("write `model.layers.*.self_attn: replicate_seq`" in one.help for one in about)
    assert tp == 1 or (tp in allowed_tp(resolved)) == (not found and tp != 3)


def test_tp_sizes_are_listed_with_the_ranks_of_cp_that_exchange_heads():
    on = overlays_of(False, MeshSizes(cp=2), context=True)
    resolved, _ = bind(plan(EXCHANGED), tree("llama-3.1-8b"), MeshSizes(tp=None, cp=8), on)
    assert allowed_tp(resolved) == (1, 2, 4)
