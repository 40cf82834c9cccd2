"""Diffusion transformers of diffusers: the built-in plans against their table, on real processes, and in the example."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardplan import verify
from tests.diffusion_models import DIFFUSION
from tests.zoo.diffusion import page, read, row

ROOT = Path(__file__).parent.parent
TABLE = read(ROOT / "docs" / "diffusion-types.md")
SAMPLE = ("SD3Transformer2DModel",)


def test_every_class_is_in_the_table() -> None:
    assert list(TABLE) == list(DIFFUSION)
    assert {text for one in TABLE.values() for text in one.verdicts.values()} == {"right"}
    assert (ROOT / "docs" / "diffusion-types.md").read_text("utf-8") == page(TABLE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.exhaustive) for name in DIFFUSION]
)
def test_a_class_is_as_the_table_says(name: str) -> None:
    assert row(DIFFUSION[name]) == TABLE[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SD3Transformer2DModel", "FluxTransformer2DModel"])
def test_a_class_is_proven_on_real_processes(name: str) -> None:
    """Two ranks of tp: every output and every gradient, without and with sequence parallelism."""
    one = f"tests.diffusion_models:NAMED.{name}"
    report = verify(f"{one}.build", "auto", {"tp": 2}, inputs=f"{one}.make", processes=True)
    assert report.ok and len(report.variants) == 2


@pytest.mark.slow
def test_the_example_trains_as_on_one_rank(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    found = []
    for ranks, *mesh in (("1",), ("4", "--tp", "2")):
        words = [ranks, "examples/diffusion.py", "--steps", "3", *mesh, "--losses", str(tmp_path / "losses")]
        result = subprocess.run(
            [*command, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
        )
        assert result.returncode == 0, result.stderr
        found.append([json.loads(line)["loss"] for line in (tmp_path / "losses").read_text("utf-8").splitlines()])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[0][2] < found[0][0]
