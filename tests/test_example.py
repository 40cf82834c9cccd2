"""examples/train.py, the training script that docs/training-script.md shows."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from scripts import run_script

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "train.py"


def script():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("train_example", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_batch_is_the_same_for_every_mesh_and_new_at_each_step():
    text = torch.arange(256, dtype=torch.uint8).repeat(4)
    batch = script().global_batch(text, 1, 8, 32)
    assert batch.shape == (8, 32) and batch.dtype == torch.int64
    assert torch.equal(batch, script().global_batch(text, 1, 8, 32))
    assert not torch.equal(batch, script().global_batch(text, 2, 8, 32))
    assert torch.equal((batch[:, 1:] - batch[:, :-1]) % 256, torch.ones(8, 31, dtype=torch.int64))


def parts_of_ranks(tp: int) -> tuple[list[int], tuple[int, ...]]:
    train = script()
    mesh = train.make_mesh("cpu", tp, 1)
    return train.own_part(torch.arange(8)[:, None], mesh).flatten().tolist(), tuple(mesh.shape)


@pytest.mark.slow
def test_ranks_of_one_tp_group_get_one_part():
    assert on_ranks(4, parts_of_ranks, 2) == [([0, 1, 2, 3], (2, 2))] * 2 + [([4, 5, 6, 7], (2, 2))] * 2
    assert on_ranks(4, parts_of_ranks, 4) == [(list(range(8)), (1, 4))] * 4
    assert on_ranks(4, parts_of_ranks, 1) == [([2 * rank, 2 * rank + 1], (4, 1)) for rank in range(4)]


def mesh_error(tp: int) -> str:
    try:
        script().make_mesh("cpu", tp, 1)
    except SystemExit as error:
        return str(error)
    return dist.get_backend()


@pytest.mark.slow
def test_processes_that_do_not_fit_are_told():
    assert on_ranks(4, mesh_error, 3) == ["4 processes are not a multiple of tp 3 x dp_replicate 1"] * 4


def run(ranks: int, *words: str) -> str:
    return run_script(ranks, SCRIPT, "--text", "demo/text.txt", "--batch", "4", "--seq-len", "64", *words)


def losses(file: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_a_checkpoint_is_resumed_on_another_mesh(tmp_path):
    """Four steps on dp 2 x tp 2, or two of them and two on dp 1 x tp 2: the same losses."""
    whole, second = tmp_path / "whole", tmp_path / "second"
    folder = str(tmp_path / "checkpoint")
    printed = run(4, "--tp", "2", "--sequence-parallel", "--steps", "4", "--losses", str(whole))
    assert "tensor parallel, activation checkpointing, data parallel" in printed
    weights = str(tmp_path / "weights")
    run(4, "--tp", "2", "--sequence-parallel", "--steps", "2", "--checkpoint", folder, "--export", weights)
    run(2, "--tp", "2", "--steps", "4", "--weights", weights, "--resume", folder, "--losses", str(second))
    assert losses(second) == pytest.approx(losses(whole)[2:], rel=1e-5)
    assert losses(whole)[3] < losses(whole)[0]
