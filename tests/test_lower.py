"""ResolvedPlan -> Program: what each module's part is, on reduced models."""

from __future__ import annotations

from collections import Counter

import pytest
from torch import nn

from shardplan.compiler.lower.expected_collectives import expected_collectives
from shardplan.core.layout import I, P, R, V
from shardplan.core.module_program import InputMove, OutputMove
from shardplan.core.plan import NO_OVERLAYS
from shardplan.core.tree import element
from tests.proofs import PLANS, plan_like, program_of, reduced_model


def program(name: str, *, sp: bool = False, plan=None, classes=None, **options):
    return program_of(reduced_model(name, 2, classes=classes).build(), plan or name, 2, sequence_parallel=sp, **options)


def test_every_module_that_owns_a_parameter_has_an_entry_in_the_trees_order():
    """Also those that no rule names: their parameters become DTensors too."""
    for name in ("llama", "gemma3", "mixtral"):
        model = reduced_model(name, 2).build()
        owners = {n for n, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))}
        compiled = program_of(model, name, 2)
        assert owners <= set(compiled.modules) and owners <= set(compiled.parallelize_plan)
        assert list(compiled.modules) == [n for n, _ in model.named_modules() if n in compiled.modules]


@pytest.mark.parametrize("name", PLANS)
def test_the_fsdp_units_of_a_built_in_plan_are_the_models_blocks(name):
    model = reduced_model(name, 2).build()
    assert program_of(model, name, 2).resolved.dp_units == tuple(n for n, _ in model.named_modules() if element(n))


def test_what_arrives_at_the_head():
    """Under sequence parallelism the final norm hands on R where a head follows, so the head moves nothing; without,
    the head reduces its own input gradient. A base model has no such reader: the norm hands on I."""
    assert program("llama", sp=True).modules["model.norm"].leave == OutputMove(V(1), R)
    assert program("llama", sp=True).modules["lm_head"].enter == ()
    assert program("llama").modules["lm_head"].enter == (InputMove(I, R),)
    assert program("llama", sp=True, classes="LlamaModel").modules["norm"].leave == OutputMove(V(1), I)
    whole = program("llama", sp=True, classes="LlamaForSequenceClassification")
    assert whole.modules["model.norm"].leave == OutputMove(V(1), I)


def test_the_layout_of_a_gather_can_be_said():
    plan = plan_like(
        "llama", {}, {"model.norm": {"style": "sequence_parallel", "output": "gather", "grad": "complete"}}
    )
    compiled = program("llama", sp=True, plan=plan)
    assert compiled.modules["model.norm"].leave == OutputMove(V(1), I)
    assert compiled.modules["lm_head"].enter == (InputMove(I, R),)


def test_the_sequence_parallel_entrance():
    """The embeddings that stay partial, the block input, and the module whose forward holds both."""
    links = {name: m.link for name, m in program("gpt2", sp=True).modules.items() if m.link}
    assert links == {
        "transformer": "scope", "transformer.wte": "source", "transformer.wpe": "source", "transformer.h.0": "block_input"
    }  # fmt: skip
    links = {name: m.link for name, m in program("gemma3", sp=True).modules.items() if m.link}
    assert links == {"model.language_model": "scope", "model.language_model.layers.0": "block_input"}
    assert not any(m.link for m in program("gpt2").modules.values())


def test_whole_tables_alone_begin_no_sum():
    replicated = plan_like(
        "llama", {"model.embed_tokens": "replicate"}, {"model.embed_tokens": "embedding_replicated_seq"}
    )
    modules = program("llama", sp=True, plan=replicated).modules
    assert {name: m.link for name, m in modules.items() if m.link} == {
        "model": "scope",
        "model.layers.0": "block_input",
    }
    assert modules["model.layers.0"].enter == (InputMove(I, V(1)),)


def test_groups_hold_what_a_block_must_reduce():
    groups = {name: m.group.parameters for name, m in program("qwen3").modules.items() if m.group}
    norms = (("self_attn.q_norm", "weight"), ("self_attn.k_norm", "weight"))
    assert groups == {"model.layers.0": norms, "model.layers.1": norms}
    groups = {name: m.group.parameters for name, m in program("qwen3", sp=True).modules.items() if m.group}
    assert set(groups) == {"model.layers.0", "model.layers.1", "model.norm"}
    assert set(groups["model.layers.1"]) == {
        *norms, ("input_layernorm", "weight"), ("post_attention_layernorm", "weight")
    }  # fmt: skip
    assert groups["model.norm"] == (("", "weight"),)


def test_units_inside_a_block_group_their_own():
    """A group must not read parameters across FSDP2 units, which are gathered at different times."""
    plan = plan_like("qwen3") | {"data_parallel": {"units": ["model.layers.*", "model.layers.*.self_attn"]}}
    groups = {name: m.group.parameters for name, m in program("qwen3", sp=True, plan=plan).modules.items() if m.group}
    assert groups["model.layers.0.self_attn"] == (("q_norm", "weight"), ("k_norm", "weight"))
    assert set(groups["model.layers.0"]) == {("input_layernorm", "weight"), ("post_attention_layernorm", "weight")}


def test_logits():
    assert program("llama", logits="sharded").modules["lm_head"].logits == reduced_model("llama", 2).config.vocab_size
    assert program("llama", logits="replicated").modules["lm_head"].leave == OutputMove(
        V(-1), I, reduced_model("llama", 2).config.vocab_size
    )
    assert program("llama", logits="sharded").sharded_logits and not program("llama").sharded_logits
    assert program("llama", logits="as_stored").sharded_logits
    assert [name for name, one in program("bitnet", logits="sharded").modules.items() if one.logits] == ["lm_head"]


def test_both_variants_are_compiled():
    compiled = program("llama", sp=True)
    assert compiled.variants[NO_OVERLAYS] == program("llama").modules
    assert compiled.modules != compiled.variants[NO_OVERLAYS]
    assert list(program("llama").variants) == [NO_OVERLAYS]


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(q * k + v)


@pytest.mark.parametrize(
    ("packed", "parts"), [(3, (8, 8, 8)), (["8", "2 * 4", "24 - 16"], (8, 8, 8)), (["16", "4", "4"], (16, 4, 4))]
)
def test_packed_parts(packed, parts):
    rules = {"qkv": {"style": "packed_colwise", "packed": packed}, "out": "rowwise"}
    compiled = program_of(Packed(), {"version": "1", "name": "packed", "tensor_parallel": rules}, 2)
    assert [p.parts for p in compiled.modules["qkv"].parameters] == [parts, parts]
    weight, bias = compiled.modules["out"].parameters
    assert (weight.stored, weight.computed) == (V(1), V(1))
    assert (bias.stored, bias.computed, bias.withheld) == (I, I, "none")
    assert compiled.modules["out"].leave == OutputMove(P, I, None)


def test_expected_collectives():
    compiled = program("llama", sp=True, logits="sharded")
    assert expected_collectives(compiled.modules) == {
        "forward": Counter(all_gather=5, reduce_scatter=5),
        "backward": Counter(all_gather=5, reduce_scatter=5, all_reduce=3),
    }
    assert expected_collectives(compiled.variants[NO_OVERLAYS]) == {
        "forward": Counter(all_reduce=5),
        "backward": Counter(all_reduce=5),
    }
