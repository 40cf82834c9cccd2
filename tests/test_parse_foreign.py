"""transformers' tensor-parallel plans as ours."""

import pytest

from shardplan.core.diagnostics import Location
from shardplan.language import from_hf_tp_plan, parse_plan

# LlamaForCausalLM().tp_plan and LlamaConfig().base_model_tp_plan of transformers 5.23, shortened.
RESOLVED = {"lm_head": "colwise_rep", "model.layers.*.self_attn.q_proj": "colwise", "model.norm": "sequence_parallel"}
BASE = {"layers.*.self_attn.q_proj": "colwise", "layers.*.mlp.down_proj": "rowwise", "model.norm": "replicate"}


def test_a_resolved_plan() -> None:
    parsed = from_hf_tp_plan(RESOLVED)
    assert parsed.diagnostics == ()
    plan = parsed.plan
    assert (plan.name, plan.file, plan.lenient_dead_rules) == ("hf", "<hf>", True)
    assert [(rule.pattern, rule.style) for rule in plan.tensor_parallel] == [
        ("lm_head", "colwise_gather_output"),
        ("model.layers.*.self_attn.q_proj", "colwise"),
        ("model.norm", "sequence_parallel"),
    ]
    assert plan.tensor_parallel[0].location == Location("<hf>", ("tensor_parallel", "lm_head"))
    assert not parse_plan("llama").plan.lenient_dead_rules


def test_the_base_prefix_is_put_before_what_lacks_it() -> None:
    plan = from_hf_tp_plan(BASE, "model").plan
    assert [rule.pattern for rule in plan.tensor_parallel] == [
        "model.layers.*.self_attn.q_proj",
        "model.layers.*.mlp.down_proj",
        "model.norm",
    ]
    assert [rule.pattern for rule in from_hf_tp_plan(BASE, "").plan.tensor_parallel] == list(BASE)


def test_an_unknown_style_is_a_finding() -> None:
    parsed = from_hf_tp_plan({"layers.*.mlp.experts": "grouped_gemm", "norm": "replicate", "x..y": "colwise"})
    assert parsed.plan is None
    assert [(d.code, d.primary.location.file) for d in parsed.diagnostics] == [("SP112", "<hf>"), ("SP106", "<hf>")]
    assert parsed.diagnostics[1].message == "there is no style `grouped_gemm`"


@pytest.mark.parametrize("plan", [None, ["colwise"], {"a": 1}, {1: "colwise"}])
def test_something_else_is_a_type_error(plan: object) -> None:
    with pytest.raises(TypeError, match="a tp_plan maps names to style names"):
        from_hf_tp_plan(plan)
