"""The examples besides the training script: a mixture of experts, packed documents over cp, an inference engine that gets the weights,
a notebook."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import run_script

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_experts_on_several_ranks_train_as_on_one(tmp_path):
    words = ("--text", "demo/text.txt", "--batch", "4", "--seq-len", "64", "--steps", "3")
    found = []
    for ranks, *mesh in ((1,), (4, "--tp", "2", "--ep", "2")):
        run_script(ranks, "examples/moe.py", *words, *mesh, "--losses", str(tmp_path / "losses"))
        found.append([json.loads(line)["loss"] for line in (tmp_path / "losses").read_text().splitlines()])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[0][2] < found[0][0]


LONG = [(4, "--cp", "2", "--tp", "2"), (8, "--cp", "4", "--tp", "2"), (8, "--cp", "2", "--tp", "2"), (4, "--cp", "4")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [pytest.param(ranks, mesh, marks=[pytest.mark.exhaustive] * bool(i)) for i, (ranks, *mesh) in enumerate(LONG)],
    ids=["".join((str(ranks), *mesh)) for ranks, *mesh in LONG],
)
def test_packed_documents_on_several_ranks_train_as_on_one(ranks, mesh, tmp_path):
    words = ("--text", "demo/text.txt", "--batch", "2", "--seq-len", "256", "--steps", "3")
    found = []
    for count, *sizes in ((1,), (ranks, *mesh)):
        printed = run_script(count, "examples/long_context.py", *words, *sizes, "--losses", str(tmp_path / "losses"))
        found.append([json.loads(line) for line in (tmp_path / "losses").read_text().splitlines()])
    assert "model.layers.*.self_attn: exchange_heads" in printed
    for one, other in zip(*found, strict=True):
        assert other == pytest.approx(one, rel=1e-5)
    assert found[0][2]["loss"] < found[0][0]["loss"]


@pytest.mark.slow
def test_the_engine_has_the_weights_of_the_model():
    printed = run_script(4, "examples/rl_refit.py", "--tp", "2", "--steps", "3", "--batch", "4", "--new-tokens", "8")
    differences = [float(number) for number in re.findall(r"engine against model (\S+)", printed)]
    assert len(differences) == 3 and max(differences) < 1e-5


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    cells = json.loads((ROOT / "examples" / "first_plan.ipynb").read_text("utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "SP401" in result.stdout and "bounded by" in result.stdout
