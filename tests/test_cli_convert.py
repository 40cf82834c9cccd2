"""`shardplan convert`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardplan.cli.main import main
from shardplan.language import parse_plan
from tests import foreign_plans as foreign


@pytest.fixture(autouse=True)
def no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["convert", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_file_is_written_and_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, plan = tmp_path / "ds_config.json", tmp_path / "plan.yaml"
    source.write_text(json.dumps(foreign.DEEPSPEED))
    words = (source, "--model", "llama", "--set", "num_hidden_layers=2", "-o", plan)
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, f"{plan}: written and valid\n") and out.startswith("no findings\ntp: ")
    read = parse_plan(plan).plan
    assert read is not None and read.name == "llama" and read.models == ("llama",)
    before = plan.read_text()
    code, _, err = run(capsys, *words)
    assert code == 2 and "exists; --force overwrites it" in err and plan.read_text() == before
    assert run(capsys, source, "-o", plan, "--force", "--name", "mine")[2].endswith("no model was named\n")
    assert "name: mine\n" in plan.read_text()


def test_a_plan_that_does_not_validate_is_written_with_its_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, plan = tmp_path / "names.json", tmp_path / "plan.yaml"
    source.write_text(json.dumps(foreign.NAMES | {"lm_head": "colwise"}))
    code, out, err = run(capsys, source, "--model", "llama", "--set", "num_hidden_layers=2", "-o", plan)
    assert code == 1 and "written, but not valid" in err and plan.exists()
    assert out.startswith("error[SP") and f"--> {plan}:" in out and "lm_head: colwise" in out


def test_on_standard_output_the_plan_stands_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "names.yaml"
    source.write_text("a.*.up: colwise\na.*.down: rowwise\n")
    code, out, err = run(capsys, source)
    assert (code, err) == (0, "") and out.startswith('version: "1"\nname: names\n')
    code, out, err = run(capsys, source, "--json")
    assert code == 0 and json.loads(out)["kind"] == "findings"


def test_what_cannot_be_said_is_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, plan = tmp_path / "names.json", tmp_path / "plan.yaml"
    source.write_text('{\n  "a.up": "colwise",\n  "a.router": "local_colwise"\n}')
    code, out, _ = run(capsys, source, "-o", plan)
    assert code == 1 and not plan.exists()
    assert out.startswith("error[SP541]: `local_colwise` has no counterpart") and f"--> {source}:3:3" in out


def test_code_is_imported_on_request_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "tests.foreign_plans:torchtitan_llama")[0] == 1, "a file of that name"
    code, out, _ = run(capsys, "--import", "tests.foreign_plans:torchtitan_llama")
    assert code == 0 and "name: torchtitan_llama\n" in out and "model.layers.0: split_seq_input" in out
    made = run(capsys, "--import", "tests.foreign_plans:AUTOMODEL_SP")
    assert made[0] == 0 and "lm_head: colwise_vocab" in made[1]


def test_wrong_command_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys)[0] == 2
    assert run(capsys, "a.json", "--import", "a:b")[0] == 2
    assert run(capsys, "a.json", "--from", "vllm")[0] == 2
    assert run(capsys, "a.json", "--tp", "0")[0] == 2
    assert run(capsys, "a.json", "--tp", "2")[0] == 2, "nothing is validated without a model"
