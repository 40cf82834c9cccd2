"""`shardplan validate` and `shardplan.validate`: the whole way from words to findings."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

import shardplan
from shardplan.cli.main import main
from shardplan.report.report_schema import report_schema
from tests.case_tree import read, unpack

ROOT = Path(__file__).parent.parent
MODELS = ROOT / "tests" / "cases" / "models"
QWEN = str(MODELS / "qwen3-8b.json")

SMALL = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
)
MLP = {
    "version": "1",
    "name": "mine",
    "tensor_parallel": {
        "model.layers.*.mlp": "input_with_grad_allreduce",
        "model.layers.*.mlp.{gate,up}_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
    },
}


@pytest.fixture(autouse=True)
def no_color(monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)


@pytest.fixture
def plan(tmp_path):
    """Writes a plan for Qwen3 that adds rules to the built-in one."""

    def write(**sections) -> str:
        path = tmp_path / "mine.json"
        path.write_text(json.dumps({"version": "1", "name": "mine", "extends": "qwen3", **sections}), "utf-8")
        return str(path)

    return write


def codes(report) -> list[str]:
    return [d.code for d in report.diagnostics]


SIZES = """no findings
tp: {} (checked at 2; the others by size alone)
proven at tp=2: 32 tensors are the unsharded model's
on tp 2: text [2, 16], 3 steps in train mode, float32; with use_cache=True, output_hidden_states=True, padding on the right, \
padding on the left, inputs_embeds; not with output_attentions=True
"""


def test_without_tp_every_size_is_checked_and_the_allowed_ones_are_listed(capsys):
    assert main(["validate", QWEN, "qwen3"]) == 0
    assert capsys.readouterr().out == SIZES.format("1, 2, 4, 8, 16, 32")


def test_a_size_that_does_not_divide(capsys):
    assert main(["validate", QWEN, "qwen3", "--tp", "3"]) == 1
    captured = capsys.readouterr()
    assert "error[SP301]: num_key_value_heads is 8, which tp=3 does not divide" in captured.out
    assert captured.out.endswith("tp: 1, 2, 4, 8, 16, 32 (by size alone; refused at 3)\n") and captured.err == ""


def test_settings_change_the_model(capsys):
    assert main(["validate", QWEN, "qwen3", "--set", "num_key_value_heads=4"]) == 0
    assert capsys.readouterr().out == SIZES.format("1, 2, 4, 8, 16, 32")


def test_both_variants_are_checked_unless_one_is_asked_for(plan, capsys):
    path = plan(sequence_parallel={"model.layers.*.nothing": "gather_seq_input"})
    for options, code in (([], 1), (["--sequence-parallel"], 1), (["--no-sequence-parallel"], 0)):
        assert main(["validate", QWEN, path, *options]) == code
        assert ("SP201" in capsys.readouterr().out) is bool(code)


def test_a_finding_of_both_variants_comes_once(plan):
    report = shardplan.validate(QWEN, plan(tensor_parallel={"model.layers.*.nothing": "colwise"}))
    assert codes(report) == ["SP201"]
    assert report.variants == ("tensor_parallel", "sequence_parallel")


def test_a_finding_of_one_variant_says_so():
    report = shardplan.validate(QWEN, "qwen3", {"tp": 2}, seq_len=4097)
    assert [(d.code, d.notes) for d in report.errors] == [("SP360", ("only with sequence parallelism",))]
    report = shardplan.validate(QWEN, "qwen3", {"tp": 2}, seq_len=4097, sequence_parallel=True)
    assert [(d.code, d.notes) for d in report.errors] == [("SP360", ())]


def test_a_wrong_model_and_a_wrong_plan_are_reported_together(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text("version: '1'\ntensor_parallel: {lm_head: colwize}\n", "utf-8")
    assert main(["validate", "./no/such/model", str(path)]) == 1
    shown = capsys.readouterr().out
    assert "[SP501]" in shown and "[SP106]" in shown and "tp:" not in shown


@pytest.mark.parametrize("word", ["auto", "hf"])
def test_plans_that_depend_on_the_model(word, capsys):
    assert main(["validate", QWEN, word, "--tp", "2"]) == 0
    assert main(["validate", "./no/such/model", word]) == 1
    assert "[SP501]" in capsys.readouterr().out


def test_strict_makes_warnings_errors(capsys):
    words = ["validate", QWEN.replace("qwen3-8b", "mistral-7b"), "llama", "--tp", "2", "--no-sequence-parallel"]
    assert main(words) == 0
    assert "warning[SP205]" in capsys.readouterr().out
    assert main([*words, "--strict"]) == 1
    assert "error[SP205]" in capsys.readouterr().out


def test_what_follows_from_a_finding_is_counted_and_shown_if_wanted(capsys, tmp_path, monkeypatch):
    case = read(MODELS.parent / "err" / "SP403-unreduced.case")
    unpack(case, tmp_path)
    monkeypatch.chdir(tmp_path)
    words = list(case.command)
    assert main(words) == 1
    short = capsys.readouterr().out
    assert short.count("error[") == 1 and "that follow from them (--verbose)" in short
    assert main([*words, "--verbose"]) == 1
    long = capsys.readouterr().out
    assert long.count("error[") > 1 and long.startswith(short.partition("\n\n1 error")[0])
    assert main([*words, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert len(data["diagnostics"]) == 1 and len(data["secondary"]) == long.count("error[") - 1


def test_json(capsys):
    assert main(["validate", QWEN, "qwen3", "--tp", "3", "--dp-shard", "2", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(report_schema()).validate(data)
    assert data["allowed_tp"] == [1, 2, 4, 8, 16, 32] and data["checked_tp"] == 3
    assert data["sizes"]["dp_shard"] == 2 and data["plans"] == ["qwen3"] and data["model"] == QWEN
    assert sum(data["count"].values()) == len(data["diagnostics"]) and data["count"]["errors"] == 2


def test_sarif(tmp_path, capsys):
    path = tmp_path / "out.sarif"
    assert main(["validate", QWEN, "qwen3", "--tp", "3", "--sarif", str(path)]) == 1
    (run,) = json.loads(path.read_text("utf-8"))["runs"]
    (location,) = run["results"][0]["locations"]
    assert location["physicalLocation"]["artifactLocation"]["uri"] == "plans/llama.yaml"
    assert main(["validate", QWEN, "qwen3", "--sarif", str(tmp_path / "no" / "such" / "folder")]) == 2
    assert "error: cannot write" in capsys.readouterr().err


def test_what_a_model_s_own_code_prints_does_not_spoil_the_report(tmp_path):
    code = "from transformers import LlamaConfig, LlamaForCausalLM\nprint('hello')\n"
    code += "def build():\n    print('building')\n    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1))\n"
    (tmp_path / "own.py").write_text(code, "utf-8")
    result = subprocess.run(
        [sys.executable, "-m", "shardplan", "validate", "own:build", "llama", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert json.loads(result.stdout)["ok"] is True and result.returncode == 0
    assert "building" in result.stderr


class TestPython:
    def test_a_module_a_configuration_and_its_words_give_the_same(self):
        module = shardplan.validate(LlamaForCausalLM(SMALL), MLP, {"tp": 5})
        config = shardplan.validate(SMALL, MLP, {"tp": 5})
        assert codes(module) == codes(config) and "SP303" in codes(module)
        assert not module.ok and module.allowed_tp == config.allowed_tp

    def test_a_base_model_is_addressed_by_the_same_plan(self):
        report = shardplan.validate(LlamaModel(SMALL), "llama", {"tp": 2})
        assert report.ok, str(report)

    def test_validating_touches_nothing(self):
        model = LlamaForCausalLM(SMALL)
        before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
        shardplan.validate(model, "llama", {"tp": 2}, sequence_parallel=True)
        for name, parameter in model.named_parameters():
            assert id(parameter) == before[name][0] and parameter.equal(before[name][1])

    def test_a_loaded_plan(self):
        plan = shardplan.load_plan(MLP)
        assert plan.name == "mine"
        assert shardplan.validate(SMALL, plan, {"tp": 2}).plans == ("mine",)
        assert shardplan.load_plan(plan) is plan

    def test_a_plan_with_errors_is_not_loaded(self):
        with pytest.raises(shardplan.PlanError) as raised:
            shardplan.load_plan({"version": "1", "tensor_parallel": {"a": "colwize", "b": "rowize"}})
        assert [d.code for d in raised.value.diagnostics] == ["SP106", "SP106"]
        assert '--> <dict>["tensor_parallel"]["a"]' in str(raised.value)

    @pytest.mark.parametrize("word", ["auto", "hf"])
    def test_a_plan_that_needs_a_model_is_not_loaded_alone(self, word):
        with pytest.raises(ValueError, match="depends on the model"):
            shardplan.load_plan(word)

    def test_wrong_calls(self):
        with pytest.raises(ValueError, match="tp must be a positive integer"):
            shardplan.validate(SMALL, MLP, {"tp": 0})
        with pytest.raises(TypeError):
            shardplan.validate(5, MLP)
        with pytest.raises(TypeError):
            shardplan.validate(SMALL, 5)

    def test_a_plan_for_no_size(self):
        config = LlamaConfig(**{**SMALL.to_dict(), "intermediate_size": 97})
        report = shardplan.validate(config, "llama")
        assert codes(report) == ["SP307"] and report.allowed_tp == (1,) and report.checked_tp is None

    def test_the_report_as_text_stands_alone(self):
        report = shardplan.validate(SMALL, MLP, {"tp": 5})
        first, *_ = str(report).split("\n")
        assert first == "error[SP303]: intermediate_size is 96, which tp=5 does not divide"
        assert str(report).endswith("tp: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96 (by size alone; refused at 5)")
