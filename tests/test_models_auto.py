"""PLAN `auto`."""

import pytest

from shardplan.core.diagnostics import PlanError
from shardplan.core.plan import PlanFile
from shardplan.core.tree import ModuleInfo, ModuleTree
from shardplan.model import choose_plan, no_plan


def plan(name, models, configurations=None):
    return PlanFile(name, name, models=models, configurations=configurations)


PLANS = (
    plan("llama", ("llama",)),
    plan("qwen3", ("qwen3",)),
    plan("qwen3_moe", ("qwen3_moe",)),
    plan("gemma3", ("gemma3", "Gemma3ForConditionalGeneration")),
    plan("scored", ("LlamaForSequenceClassification",)),
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
    assert choose_plan(tree(model_type, *class_names), PLANS, admits).name == chosen


def admits(plan):
    return plan.configurations != "false"


def test_the_configuration_decides_between_plans_of_one_type():
    plans = (plan("few", ("llama",), "false"), plan("many", ("llama",), "true"), *PLANS[1:])
    assert choose_plan(tree("llama", "LlamaForCausalLM"), plans, admits).name == "many"


def test_a_plan_of_the_class_for_other_configurations_is_not_looked_at():
    plans = (*PLANS, plan("other", ("LlamaForCausalLM",), "false"))
    assert choose_plan(tree("llama", "LlamaForCausalLM"), plans, admits).name == "llama"


def test_none_is_for_the_configuration():
    plans = (plan("few", ("llama",), "false"),)
    assert choose_plan(tree("llama"), plans, admits) is None
    (diagnostic,) = no_plan(tree("llama"), plans).diagnostics
    assert diagnostic.notes == ("the plan few is for configurations with `false`",)


def test_only_plans_that_name_the_model_are_asked():
    asked = []
    choose_plan(tree("qwen3"), PLANS, lambda plan: asked.append(plan.name) is None)
    assert asked == ["qwen3"]


def refusal(model_type, class_names=()):
    (diagnostic,) = no_plan(tree(model_type, *class_names), PLANS).diagnostics
    return diagnostic


def test_none_lists_the_nearest():
    diagnostic = refusal("qwen2_moe", ("Qwen2MoeForCausalLM",))
    assert diagnostic.code == "SP511"
    assert diagnostic.message == "no built-in plan is for Qwen2MoeForCausalLM (model type qwen2_moe)"
    assert diagnostic.help.endswith("; nearest: qwen3_moe")


def test_none_near():
    assert refusal("bloom").help.endswith("may serve as its parent (`extends`)")
    assert refusal(None).code == "SP511"


def test_several():
    with pytest.raises(PlanError) as caught:
        choose_plan(tree("llama"), (*PLANS, plan("other", ("llama",))), admits)
    (diagnostic,) = caught.value.diagnostics
    assert (diagnostic.code, diagnostic.message) == ("SP512", "the plans llama, other are all for llama")
