"""PLAN `auto`."""

from dataclasses import dataclass

import pytest

from shardplan.core.diagnostics import PlanError
from shardplan.core.tree import ModuleInfo, ModuleTree
from shardplan.model import choose_plan


@dataclass(frozen=True)
class Plan:
    name: str
    models: tuple[str, ...]


PLANS = (
    Plan("llama", ("llama",)),
    Plan("qwen3", ("qwen3",)),
    Plan("qwen3_moe", ("qwen3_moe",)),
    Plan("gemma3", ("gemma3", "Gemma3ForConditionalGeneration")),
    Plan("scored", ("LlamaForSequenceClassification",)),
)


def tree(model_type, *class_names):
    return ModuleTree(class_names, model_type, {"": ModuleInfo("", "X", "other")})


@pytest.mark.parametrize(
    ("model_type", "class_names", "chosen"),
    [
        ("llama", ("LlamaForCausalLM", "PreTrainedModel"), "llama"),
        ("llama", ("LlamaForSequenceClassification", "PreTrainedModel"), "scored"),
        ("llama", ("MyScorer", "LlamaForSequenceClassification"), "scored"),
        ("gemma3", ("Gemma3ForConditionalGeneration",), "gemma3"),
        (None, ("Gemma3ForConditionalGeneration",), "gemma3"),
        ("qwen3", (), "qwen3"),
    ],
)
def test_the_class_comes_before_the_type(model_type, class_names, chosen):
    assert choose_plan(tree(model_type, *class_names), PLANS) == chosen


def refusal(model_type, class_names=(), plans=PLANS):
    with pytest.raises(PlanError) as caught:
        choose_plan(tree(model_type, *class_names), plans)
    (diagnostic,) = caught.value.diagnostics
    return diagnostic


def test_none_lists_the_nearest():
    diagnostic = refusal("qwen2_moe", ("Qwen2MoeForCausalLM",))
    assert diagnostic.code == "SP511"
    assert diagnostic.message == "no built-in plan is for Qwen2MoeForCausalLM (model type qwen2_moe)"
    assert diagnostic.help.endswith("; nearest: qwen3_moe")


def test_none_near():
    assert refusal("bloom").help.endswith("; `shardplan init` writes a plan for any model")
    assert refusal(None).code == "SP511"


def test_several():
    diagnostic = refusal("llama", plans=(*PLANS, Plan("other", ("llama",))))
    assert (diagnostic.code, diagnostic.message) == ("SP512", "the plans llama, other are all for llama")
