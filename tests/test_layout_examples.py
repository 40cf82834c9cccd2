"""The pages of the codes that need a run of the model: the wrong example has that error alone, the right one has none."""

import json
import shlex
from pathlib import Path

import pytest

from shardplan.cli.main import main
from tests.case_tree import CASES
from tests.code_pages import codes_in, examples

COMMAND = "# shardplan validate "
CODES = [code for code in codes_in("compiler/layout") if examples(code).get("Wrong", "").startswith(COMMAND)]


@pytest.mark.slow
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("word", ["Wrong", "Right"])
def test_an_example_of_a_page(
    code: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    example = examples(code)[word]
    model, *options = shlex.split(example.partition("\n")[0].removeprefix(COMMAND))
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(example)
    file = CASES / "models" / model  # else a model type
    main(["validate", str(file) if file.exists() else model, *options, "--json"])
    found = json.loads(capsys.readouterr().out)["diagnostics"]
    assert {finding["code"] for finding in found if finding["severity"] == "error"} == (
        {code} if word == "Wrong" else set()
    )
