"""docs/own-model.md to its end, as somebody follows it with a model of their own: checked, trained on four processes, killed,
gone on with, and exported."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.doc_blocks import ROOT, blocks

RANKS = 4
PAGE = list(blocks((ROOT / "docs" / "own-model.md").read_text("utf-8")))


def folder_of(place: Path) -> Path:
    """The page's files, and the project's demo."""
    place.mkdir()
    for block in PAGE:
        if block.file:
            (place / block.file).write_text(block.text + "\n")
    (place / "demo").symlink_to(ROOT / "demo")
    return place


def started(folder: Path) -> subprocess.Popen[str]:
    """The page's command, with what it prints."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*words, "train_my_model.py"],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
    )


def losses(folder: Path, stop: int | None = None) -> dict[int, str]:
    """Those that a run prints; all its ranks are killed at once when it has printed a step."""
    found: dict[int, str] = {}
    run = started(folder)
    assert run.stdout is not None
    for line in run.stdout:
        if (said := re.match(r"step +(\d+)  loss (\S+)", line)) is not None:
            found[int(said[1])] = said[2]
            if int(said[1]) == stop:
                for rank in ranks_of(run):
                    os.kill(rank, signal.SIGKILL)
    assert run.wait(timeout=240) == (0 if stop is None else 1)
    return found


def ranks_of(run: subprocess.Popen[str]) -> list[int]:
    """The process ids of the ranks that a launcher has started."""
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text("utf-8")
    return [int(pid) for pid in children.split()]


def on_one_process(folder: Path, steps: int) -> list[float]:
    """The losses of the unsharded model in torch alone, from the weights that the page's script draws."""
    code = f"""
import torch
import torch.distributed as dist
from pathlib import Path
from my_model import build
from shardplan import apply_plan, full_parameters, materialize
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with torch.device("meta"):
    drawn = build()
apply_plan(drawn, dist.init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",)), "my-plan.yaml")
torch.manual_seed(0)
materialize(drawn, "cpu")
model = build()
model.load_state_dict(dict(full_parameters(drawn)))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
text = torch.frombuffer(bytearray(Path("demo/text.txt").read_bytes()), dtype=torch.uint8)
for step in range(1, {steps} + 1):
    starts = torch.randint(len(text) - 65, (8,), generator=torch.Generator().manual_seed(step)).tolist()
    ids = torch.stack([text[start : start + 65] for start in starts]).long()
    loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    print(loss.item())
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


@pytest.mark.slow
def test_a_model_of_ones_own_is_trained_killed_and_exported(tmp_path: Path) -> None:
    whole, killed = folder_of(tmp_path / "whole"), folder_of(tmp_path / "killed")
    wanted = losses(whole)
    assert list(wanted) == list(range(1, 31))
    before = losses(killed, stop=14)
    after = losses(killed)
    assert list(after) == list(range(11, 31))
    assert before | after == wanted
    torch.testing.assert_close(
        [float(one) for one in wanted.values()][:10], on_one_process(whole, 10), rtol=1e-4, atol=0
    )
    exported, again = (load_file(folder / "exported" / "model.safetensors") for folder in (whole, killed))
    assert exported.keys() == again.keys() and all(torch.equal(exported[name], again[name]) for name in exported)
    check = "from my_model import build; from safetensors.torch import load_model as f; f(build(), 'exported/model.safetensors')"
    subprocess.run([sys.executable, "-c", check], cwd=whole, check=True)
