"""examples/train_pipeline.py, on four processes."""

import json
from pathlib import Path

import pytest
from scripts import run_script


def run(*words: str) -> str:
    return run_script(4, "examples/train_pipeline.py", "--text", "demo/text.txt", "--seq-len", "32", *words)


def losses(file: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_training_goes_on_on_another_mesh(tmp_path):
    """Two steps on pp 2 x tp 2, and two more on pp 2 x dp 2."""
    first, second, state = tmp_path / "first", tmp_path / "second", str(tmp_path / "state")
    shown = run(
        *("--tp", "2", "--sequence-parallel", "--steps", "2", "--batch", "8"),
        "--losses",
        str(first),
        "--checkpoint",
        state,
    )
    assert "pipeline on pp 2 x tp 2: 2 stages of" in shown
    run(
        *("--steps", "4", "--batch", "4", "--schedule", "gpipe", "--losses", str(second)),
        *("--resume", state, "--export", str(tmp_path / "weights")),
    )
    assert len(losses(first)) == len(losses(second)) == 2
    assert max(losses(second)) < min(losses(first))
    assert (tmp_path / "weights" / "config.json").is_file()
