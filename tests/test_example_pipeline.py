"""examples/train_pipeline.py, on four processes that torchrun starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def torchrun(*words: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    given = ("--text", "demo/text.txt", "--seq-len", "32", *words)
    script = str(ROOT / "examples" / "train_pipeline.py")
    result = subprocess.run(
        [*command, script, *given], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def losses(file: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_training_goes_on_on_another_mesh(tmp_path):
    """Two steps on pp 2 x tp 2, and two more on pp 2 x dp 2."""
    first, second, state = tmp_path / "first", tmp_path / "second", str(tmp_path / "state")
    shown = torchrun(
        *("--tp", "2", "--sequence-parallel", "--steps", "2", "--batch", "8"),
        "--losses",
        str(first),
        "--checkpoint",
        state,
    )
    assert "pipeline on pp 2 x tp 2: 2 stages of" in shown
    torchrun(
        *("--steps", "4", "--batch", "4", "--schedule", "gpipe", "--losses", str(second)),
        *("--resume", state, "--export", str(tmp_path / "weights")),
    )
    assert len(losses(first)) == len(losses(second)) == 2
    assert max(losses(second)) < min(losses(first))
    assert (tmp_path / "weights" / "config.json").is_file()
