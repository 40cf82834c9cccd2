"""docs/compared.md: what the column "here" names is there, and each of its commands runs."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from itertools import pairwise
from pathlib import Path

import foreign_plans as foreign
import pytest

import shardplan
from shardplan.cli.main import main

ROOT = Path(__file__).parent.parent
SPAN = re.compile(r"`([^`]+)`")
# A published model's file would do as well; this one is proven in a second.
WORDS = {"MODEL": "tiny-qwen3.json", "PLAN": "mine.yaml", "OLD": "old.yaml", "NEW": "new.yaml"}
NOT_OURS = {"auto", "nn.Module"}  # a word of the language, and a class of torch
WHOLE_MLP = """tensor_parallel:
  model.layers.*.mlp: replicate
  model.layers.*.mlp.{gate,up,down}_proj: replicate
"""
DIFFERENT = {"diff": 1}  # training would differ


def spans() -> list[str]:
    """Everything in code form that the column has, row by row."""
    rows = [
        line.split(" | ") for line in (ROOT / "docs/compared.md").read_text("utf-8").splitlines() if line[:2] == "| "
    ]
    return [text for row in rows for text in SPAN.findall(row[1])]


COMMANDS = [text for text in spans() if text.startswith("shardplan ")]
SLOW = ("fit", "diff", "show", "init", "verify", "estimate")


def test_each_name_is_one_of_ours() -> None:
    names = [text for text in spans() if not text.startswith("shardplan ") and text not in NOT_OURS]
    assert {"PipelineOptions", "save_checkpoint", "load_training_state"} <= set(names)
    assert [name for name in names if not hasattr(shardplan, name)] == []


def test_the_table_has_commands() -> None:
    assert len(COMMANDS) >= 15


@pytest.mark.parametrize(
    "text", [pytest.param(c, marks=pytest.mark.slow) if c.split()[1] in SLOW else c for c in COMMANDS]
)
def test_a_command_of_the_table_runs(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "examples/tiny-qwen3.json", tmp_path)
    for name, further in (("mine", ""), ("old", ""), ("new", WHOLE_MLP)):
        text_of = f'version: "1"\nname: {name}\nextends: qwen3\nmodels: [qwen3]\n{further}'
        (tmp_path / f"{name}.yaml").write_text(text_of, "utf-8")
    (tmp_path / "ds_config.json").write_text(json.dumps(foreign.DEEPSPEED), "utf-8")
    _, *words = shlex.split(text)
    command, *_ = words
    code = main([WORDS.get(word, word) for word in words])
    said = capsys.readouterr()
    assert code == DIFFERENT.get(command, 0), said.err + said.out
    written = [tmp_path / name for option, name in pairwise(words) if option in ("-o", "--html")]
    assert said.out or written[0].stat().st_size
