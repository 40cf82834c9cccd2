"""`shardplan list`: the collection, and what a plan splits of one model."""

from __future__ import annotations

import json

import jsonschema
import pytest

from shardplan import Model, PlanError, coverage
from shardplan.cli.main import main
from shardplan.language import builtin_plans, parse_plan
from shardplan.report.report_schema import report_schema


def test_the_collection_has_a_row_for_each_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    rows = [line.replace("(by name)", "-").split()[:2] for line in capsys.readouterr().out.splitlines()[1:]]
    plans = {name: parse_plan(name).plan for name in builtin_plans()}
    assert sorted(rows) == sorted([model, name] for name, plan in plans.items() for model in plan.models or ("-",))


def test_the_collection_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, report_schema())
    rows = {row["model"]: row for row in found["plans"]}
    assert rows["llama"]["plan"] == "llama" and rows["llama"]["sequence_parallel"] is True
    assert rows["opt"]["sequence_parallel"] is False


@pytest.mark.torch
def test_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "mixtral", "--set", "num_key_value_heads=4"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "model                        mixtral",
        "plan                         mixtral",
        "tp sizes, tensor parallel    1, 2, 4, 8, 16, 32",
        "tp sizes, sequence parallel  1, 2, 4, 8, 16, 32",
        "split inside the layers      100.0% of the parameters",
        "whole on every rank          model.layers.*.mlp.gate, under 0.1%",
    ]


@pytest.mark.torch
def test_a_model_without_an_overlay(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "opt"]) == 0
    assert "none: the plan has no sequence_parallel section" in capsys.readouterr().out


@pytest.mark.torch
def test_a_model_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "mixtral", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, report_schema())
    assert found["plan"] == "mixtral" and found["allowed_tp"]["tensor_parallel"] == [1, 2, 4, 8, 16, 32]
    assert list(found["whole"]) == ["model.layers.*.mlp.gate"]


@pytest.mark.torch
def test_the_share_is_of_the_parameters_inside_the_layers() -> None:
    """Of a Mixtral layer all but the router and two norms: 32 hidden features, 8 experts."""
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    found = coverage(Model("mixtral", settings=sizes | {"head_dim": 8}))
    attention, experts, whole = 2 * 32 * 32 + 2 * 16 * 32, 8 * 3 * 32 * 16, 8 * 32 + 2 * 32
    assert found.split == (attention + experts) / (attention + experts + whole)
    assert found.whole == {"model.layers.*.mlp.gate": 8 * 32 / (attention + experts + whole)}


@pytest.mark.parametrize("words", [["list", "--set", "vocab_size=8"], ["list", "--trust-remote-code"]])
def test_settings_are_for_a_model(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        raise SystemExit(main(words))
    assert caught.value.code == 2
    assert "are for a MODEL" in capsys.readouterr().err


@pytest.mark.torch
def test_a_model_that_no_plan_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "clip"]) == 1
    assert "error[SP511]" in capsys.readouterr().out
    with pytest.raises(PlanError, match="SP511"):
        coverage("clip", derive=False)
