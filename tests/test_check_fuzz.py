"""Whatever a plan says about whatever model: findings, never a traceback, in bounded time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.compiler.bind import bind
from shardplan.compiler.check import allowed_tp, check
from shardplan.core.diagnostics import Location
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import PlanFile, Rule, overlays_of
from shardplan.core.sections import ActivationCheckpointing, DataParallel
from shardplan.core.shares import Share
from shardplan.core.tree import ModuleTree
from shardplan.styles import NONE, STYLES
from tests.code_pages import codes_in
from tests.sampling import examples
from tests.trees import gpt2, llama_8b, mixtral_8x7b, phi3_mini

MODELS: tuple[ModuleTree, ...] = (
    llama_8b(layers=2),
    llama_8b(layers=2, tied=True, kv_heads=lambda layer: 8 - 4 * layer),
    llama_8b(layers=1, headless=True),
    gpt2(dropout=0.1, layers=2),
    mixtral_8x7b(layers=2),
    phi3_mini(layers=1),
)
KEYS = (
    "**", "*", "lm_head", "lm_head.weight", "model", "model.*", "model.embed_tokens", "model.layers", "model.layers.*",
    "model.layers.0", "model.layers.*.*", "model.layers.*.self_attn", "model.layers.*.self_attn.*_proj",
    "model.layers.*.self_attn.{q,k,v}_proj", "model.layers.*.self_attn.{q,k}_proj.weight",
    "model.layers.*.self_attn.o_proj", "model.layers.*.self_attn.qkv_proj", "model.layers.*.mlp",
    "model.layers.*.mlp.*", "model.layers.*.mlp.down_proj", "model.layers.*.mlp.down_proj.weight",
    "model.layers.*.mlp.experts", "model.layers.*.mlp.experts.*", "model.layers.*.mlp.experts.down_proj",
    "model.layers.*.*norm", "model.norm", "model.norm.weight", "transformer.wte", "transformer.wpe", "transformer.h.*",
    "transformer.h.*.attn", "transformer.h.*.attn.c_attn", "transformer.h.*.attn.*.bias", "transformer.h.*.mlp.c_*",
    "nothing.like.this", "model.layers.*.self_attn.q_prj",
)  # fmt: skip
EXPRESSIONS = st.sampled_from(["hidden_size", "num_key_value_heads * 128", "0", "0 - 3", "1 // 0", "7", "missing"])
NAMES = st.sampled_from(["head_dim", "num_heads", "config.num_attention_heads", "config.attn_pdrop", "none", "config."])
TENSORS = st.sampled_from(["hidden_states", "inv_freq", "head_dim"])
SHARES = st.one_of(
    st.builds(Share, NAMES),
    st.builds(Share, TENSORS, value=EXPRESSIONS),
    st.builds(Share, NAMES, groups=EXPRESSIONS),
    st.builds(Share, TENSORS, dim=st.integers(0, 3), heads=st.none() | EXPRESSIONS),
    st.builds(Share, TENSORS, dim=st.integers(0, 3), like=st.sampled_from(["q_proj", "c_attn", "missing"])),
)
SOME = st.sampled_from(KEYS)


@st.composite
def rules(draw: st.DrawFn, section: str) -> Rule:
    key = draw(SOME)
    return Rule(
        pattern=key,
        style=draw(st.sampled_from([*STYLES, NONE])),
        location=Location("mine.yaml", (section, key)),
        optional=draw(st.booleans()),
        override=draw(st.booleans()),
        argument=draw(st.sampled_from([None, "hidden_states"])),
        grad=draw(st.sampled_from([None, "partial", "complete"])),
        output=draw(st.sampled_from([None, None, "gather", "all_reduce", "reduce_scatter"])),
        packed=draw(st.none() | st.integers(1, 5) | st.lists(EXPRESSIONS, min_size=2, max_size=3).map(tuple)),
        shares=tuple(draw(st.lists(SHARES, max_size=3))),
        divides=tuple(draw(st.lists(EXPRESSIONS, max_size=2))),
    )


@st.composite
def plans(draw: st.DrawFn, depth: int = 1) -> PlanFile:
    globs = st.lists(SOME, max_size=3).map(tuple)
    data = DataParallel(
        backend=draw(st.sampled_from(["fsdp2", "ddp"])),
        units=draw(globs),
        reshard_after_forward=draw(st.sampled_from([True, 3, "all_but_last"])),
    )
    return PlanFile(
        name="mine",
        file="mine.yaml",
        models=tuple(draw(st.lists(st.sampled_from(["llama", "gpt2"]), max_size=1))),
        tensor_parallel=tuple(draw(st.lists(rules("tensor_parallel"), max_size=6))),
        sequence_parallel=tuple(draw(st.lists(rules("sequence_parallel"), max_size=4))),
        data_parallel=draw(st.none() | st.just(data)),
        activation_checkpointing=draw(st.none() | globs.map(ActivationCheckpointing)),
        parent=draw(plans(depth - 1)) if depth and draw(st.booleans()) else None,
    )


@settings(max_examples=examples(200), deadline=None)
@given(
    plans(),
    st.sampled_from(range(len(MODELS))),
    st.sampled_from([None, 1, 2, 3, 8, 513]),
    st.sampled_from([1, 2, 6]),
    st.booleans(),
    st.none() | st.integers(1, 5000),
)
def test_every_plan_ends_in_findings(plan, model, tp, dp_shard, sequence_parallel, seq_len):
    sizes = MeshSizes(tp=tp, dp_shard=dp_shard)
    resolved, found = bind(plan, MODELS[model], sizes, overlays_of(sequence_parallel))
    found += check(resolved, seq_len=seq_len)
    allowed = allowed_tp(resolved)
    assert allowed == tuple(sorted(set(allowed))) and 1 in allowed
    assert {d.code for d in found} <= set(codes_in("compiler/bind", "compiler/check"))
    for finding in found:
        assert finding.message and not finding.message.endswith(".") and "\n" not in finding.message
        assert finding.help, finding.code
        hash(finding)
    # A size that is allowed has no finding about what does not divide.
    divisibility = {"SP301", "SP302", "SP303", "SP321"}
    if tp in allowed:
        assert not divisibility & {d.code for d in found}
