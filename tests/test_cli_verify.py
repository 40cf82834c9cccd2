"""`shardplan verify` and `shardplan show` from the command line."""

import json
from pathlib import Path

import jsonschema
import pytest

from shardplan.cli.main import main
from shardplan.report.report_schema import report_schema

QWEN = str(Path(__file__).parent / "cases" / "models" / "qwen3-8b.json")

WRONG = """\
version: "1"
name: wrong
extends: qwen3
tensor_parallel:
  # The rule promises complete gradients for norms, but each rank sees its own heads only.
  model.layers.*.self_attn.{q,k}_norm: replicate
"""


@pytest.fixture(autouse=True)
def no_color(monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def test_a_right_plan_is_proven_in_both_variants(capsys):
    assert main(["verify", QWEN, "qwen3", "--tp", "2", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    data = json.loads(captured.out)
    jsonschema.Draft202012Validator(report_schema()).validate(data)
    assert data["kind"] == "findings" and data["proven"] and not data["diagnostics"]
    assert [proof["variant"] for proof in data["proof"]["variants"]] == ["tensor_parallel", "sequence_parallel"]
    for proof in data["proof"]["variants"]:
        assert proof["ok"] and 0 < proof["sharded"] < proof["parameters"]
        outputs = [row["name"] for row in proof["rows"] if row["kind"] == "output"]
        kinds = [row["kind"] for row in proof["rows"]]
        assert outputs == ["loss", "logits", *(f"hidden_states.{i}" for i in range(3))]
        assert kinds.count("gradient") > 20 and kinds.count("buffer") == 2


def test_a_wrong_gradient_is_found(tmp_path, capsys):
    path = tmp_path / "wrong.yaml"
    path.write_text(WRONG, "utf-8")
    assert main(["verify", QWEN, str(path), "--tp", "2", "--no-sequence-parallel"]) == 1
    shown = capsys.readouterr().out
    table = shown.partition("\n\n")[0].split("\n")
    differing = [line.split()[0] for line in table if line.startswith("  ") and " differs" in line]
    assert differing == [
        "model.layers.0-1.self_attn.q_norm.weight",
        "model.layers.0-1.self_attn.k_norm.weight",
    ]
    assert "error[SP401]" in shown and "error[SP420]" in shown and shown.index("differs") < shown.index("error[")


def test_what_splits_nothing_is_not_proven(tmp_path, capsys):
    path = tmp_path / "whole.yaml"
    path.write_text('version: "1"\ntensor_parallel:\n  model.norm: replicate\n', "utf-8")
    assert main(["validate", "llama", str(path), "--tp", "2", "--set", "num_hidden_layers=1"]) == 0
    assert main(["verify", "llama", str(path), "--tp", "2", "--set", "num_hidden_layers=1"]) == 1
    assert "error[SP421]: nothing is proven: the plan splits nothing" in capsys.readouterr().out


def test_a_plan_with_findings_is_not_run(capsys):
    assert main(["verify", QWEN, "qwen3", "--tp", "3"]) == 1
    assert "error[SP301]" in capsys.readouterr().out


def test_data_parallelism_alone_needs_processes(capsys):
    assert main(["verify", QWEN, "qwen3", "--tp", "1", "--dp-shard", "2"]) == 2
    assert "--processes" in capsys.readouterr().err
    assert main(["verify", QWEN, "qwen3", "--tp", "2", "--dp-shard", "4", "--no-sequence-parallel"]) == 0
    assert "tensor parallel, dp_shard 4, tp 2 (simulated in one process)" in capsys.readouterr().out


def test_show(capsys):
    assert main(["show", QWEN, "auto", "--tp", "8", "--sequence-parallel"]) == 0
    shown = capsys.readouterr().out
    assert "model.layers.0-35.self_attn.q_norm" in shown and "reduce-scatter" in shown
    assert main(["show", QWEN, "auto", "--tp", "8", "--all"]) == 0
    assert "model.layers.35.self_attn.q_norm" in capsys.readouterr().out


def test_show_needs_no_size(capsys):
    assert main(["show", QWEN, "auto"]) == 0
    printed = capsys.readouterr()
    assert "shown at tp 2, the smallest size that splits the model" in printed.err
    assert "\ntp 2: " in printed.out and "V(d): split in dim d" in printed.out


def test_show_as_json_is_what_the_schema_says(capsys):
    assert main(["show", QWEN, "auto", "--tp", "8", "--sequence-parallel", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(report_schema()).validate(data)
    modules = {one["name"]: one for one in data["modules"]}
    (weight,) = modules["model.layers.35.self_attn.o_proj"]["parameters"]
    assert (weight["stored"], weight["computed"]) == ("V(1)", "V(1)")
    assert modules["model.layers.35.self_attn.o_proj"]["output"] == {"src": "P", "dst": "V(1)", "size": None}
    assert "self_attn.q_norm.weight" in modules["model.layers.0"]["summed"]
    assert data["collectives"].keys() == {"forward", "backward"}


def test_show_prints_what_the_layout_check_finds(tmp_path, capsys):
    path = tmp_path / "wrong.yaml"
    path.write_text(WRONG, "utf-8")
    assert main(["show", QWEN, str(path), "--tp", "2"]) == 1
    assert "error[SP401]" in capsys.readouterr().out


PAIRS = """version: "1"
name: mine
tensor_parallel:
  layers.*.up: colwise
  layers.*.down: rowwise
"""


def test_a_module_is_called_with_the_inputs_that_are_named(tmp_path, capsys):
    plan = tmp_path / "plan.yaml"
    plan.write_text(PAIRS, "utf-8")
    words = ["tests.case_models:blocks", str(plan), "--tp", "2"]
    assert main(["verify", *words, "--inputs", "tests.case_models:features"]) == 0
    assert "layers.0-1.up.weight" in capsys.readouterr().out
    assert main(["verify", *words, "--inputs", "tests.case_models:features", "--processes"]) == 0
    capsys.readouterr()
    assert main(["verify", *words]) == 1
    assert "error[SP522]" in capsys.readouterr().out


def test_show_prints_the_findings_of_a_plan_that_does_not_fit(capsys):
    assert main(["show", QWEN, "qwen3", "--tp", "3"]) == 1
    assert "error[SP301]" in capsys.readouterr().out


def test_a_plan_with_which_the_model_does_not_run_is_a_finding(tmp_path, capsys):
    """The code between the matrices counts all heads, where each rank has its own."""
    path = tmp_path / "raises.yaml"
    path.write_text(
        'version: "1"\nname: raises\ntensor_parallel:\n'
        "  transformer.h.*.attn: input_with_grad_allreduce\n"
        "  transformer.h.*.attn.{k,v,q}_proj: colwise\n  transformer.h.*.attn.out_proj: rowwise\n",
        "utf-8",
    )
    quiet = [f"--set={name}=0" for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")]
    assert main(["verify", "gptj", str(path), "--tp", "2", *quiet]) == 1
    assert "error[SP408]" in capsys.readouterr().out
