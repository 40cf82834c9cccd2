"""`shardplan init --expert-parallel`: a section that distributes the experts, validated and proven."""

from __future__ import annotations

import pytest
from sampling import sampled
from transformers import AutoConfig

from shardplan import PlanError, init_plan, validate
from shardplan.cli.main import main
from shardplan.language import parse_text


def rules(section) -> dict[str, str]:
    return {rule.pattern: rule.style for rule in section}


def test_the_option_writes_the_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "mixtral", "--expert-parallel"]) == 0
    plan = parse_text(capsys.readouterr().out).plan
    assert plan is not None
    assert rules(plan.expert_parallel) == {
        "model.layers.*.mlp": "none",
        "model.layers.*.mlp.gate": "token_wise",
        "model.layers.*.mlp.experts": "ep_dispatch",
    }


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(PlanError) as raised:
        init_plan("llama", expert_parallel=True)
    (found,) = raised.value.diagnostics
    assert found.code == "SP533" and "no module has stacks of experts" in found.notes[0]


@pytest.mark.slow
def test_a_model_that_could_have_experts_and_has_none() -> None:
    """Asked for the logits of its routers, it raises."""
    dense = {"num_hidden_layers": 2, "mlp_only_layers": [0, 1], "hidden_size": 64, "intermediate_size": 128}
    config = AutoConfig.for_model("qwen3_moe", vocab_size=256, **dense)
    plan = parse_text(init_plan(config, tp=2).text).plan
    assert plan is not None
    assert rules(plan.tensor_parallel)["model.layers.*.mlp.down_proj"] == "rowwise"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    sampled(
        [
            # Gathered along the sequence.
            ("deepseek_v3", {"model.layers.*.mlp.shared_experts": "gather_seq_input"}),
            # Gets tokens in one row, and stays whole on a rank's.
            (
                "qwen2_moe",
                {
                    "model.layers.*.mlp.shared_expert": "none",
                    "model.layers.*.mlp.shared_expert.{gate,up,down}_proj": "token_wise",
                    "model.layers.*.mlp.shared_expert.{gate,up,down}_proj.weight": "none",
                },
            ),
            # Its router is a module around a matrix, and gives logits to a loss.
            (
                "afmoe",
                {
                    "model.layers.*.mlp.shared_experts": "none",
                    "model.layers.*.mlp.shared_experts.{gate,up,down}_proj": "token_wise",
                    "model.layers.*.mlp.shared_experts.{gate,up,down}_proj.weight": "none",
                },
            ),
            # One norm is in front of attention and experts, and gathers for both where these are split.
            (
                "cohere2_moe",
                {"model.layers.*.self_attn": "gather_seq_input", "model.layers.*.input_layernorm": "sequence_parallel"},
            ),
        ],
        2,
    ),
)
def test_experts_with_the_sequence_split(name: str, expected: dict[str, str]) -> None:
    """What is written is right on a larger mesh too."""
    made = init_plan(name, sequence_parallel=True, expert_parallel=True)
    plan = parse_text(made.text).plan
    assert plan is not None and rules(plan.expert_sequence_parallel) == expected
    report = validate(name, dict(made.document), {"tp": 2, "dp_shard": 2, "ep": 4})
    assert report.ok, report
    assert report.variants[-1] == "expert_parallel.sequence_parallel"
