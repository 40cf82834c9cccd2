"""A few of the faults of `python -m tests.faults`, and what examples/finetune.py does with saves that were killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_finetune import script

from shardplan.weights import folders
from tests.doc_blocks import ROOT


def judged(*words: str) -> str:
    command = [sys.executable, "-m", "tests.faults", *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_others_end_with_a_line_when_a_rank_is_killed():
    found = judged("--kind", "pipeline", "--what", "kill", "--count", "2")
    assert "2 restarts that were bit-equal" in found and "WRONG" not in found


@pytest.mark.slow
def test_all_ranks_save_and_leave_when_one_is_asked_to():
    found = judged("--kind", "finetune", "--what", "terminate", "--count", "1")
    assert "1 restarts that were bit-equal" in found and "1 jobs that went on or left" in found


def test_a_whole_save_gets_its_name(tmp_path: Path):
    """Killed between the two renames a state is whole and has no name; killed before, it is not whole."""
    finetune, whole, part = script(), tmp_path / "step-4", tmp_path / "step-6"
    for folder in (whole, part):
        new = folders.begin(folder, overwrite=False, marks=(".metadata",))
        (new / ".metadata").write_text("state")
    key = folders._key_of(next(folders.saves_of(whole).iterdir()))
    key.path(folders.saves_of(whole), "old").mkdir()  # the decision
    assert finetune.saves(tmp_path) == []
    finetune.name_whole_saves(tmp_path)
    assert finetune.saves(tmp_path) == [whole] and (whole / ".metadata").read_text() == "state"
    # An empty file stays, which ends the save should its process go on.
    assert all(path.is_file() for path in folders.saves_of(part).iterdir()) and not folders.saves_of(whole).exists()
