"""Saves that several jobs, several optimizers or not all ranks take part in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from small_models import batch, small_model, whole_state
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import LambdaLR, LinearLR, LRScheduler, MultiStepLR, ReduceLROnPlateau, SequentialLR

import shardplan
from shardplan.proof.compare import relative_error
from shardplan.weights import all_ranks, training_state
from tests.doc_blocks import ROOT


def planned(noise: float = 0.02, **mesh: int) -> torch.nn.Module:
    sizes = {"dp_shard": 1, "tp": 2} | mesh
    device_mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return shardplan.apply_plan(small_model("phi3", noise=noise), device_mesh, "auto", prove=False)


def two_optimizers(model: torch.nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Matrices have one, the rest another of another class."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [
        torch.optim.SGD([{"params": matrices[:3]}, {"params": matrices[3:], "lr": lr / 2}], lr=lr, momentum=0.9),
        torch.optim.AdamW(others, lr=lr),
    ]


def three_schedules(optimizers: list[torch.optim.Optimizer], factor: float) -> list[LRScheduler]:
    first, second = optimizers
    warm = [LinearLR(first, factor, total_iters=2), LambdaLR(first, lambda step: 1 / (1 + step))]
    plateau = ReduceLROnPlateau(second, factor=factor, patience=1)
    return [SequentialLR(first, warm, milestones=[2]), MultiStepLR(second, [2], gamma=factor), plateau]


def trained(
    model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], seed: int, schedules: Sequence[LRScheduler] = ()
) -> None:
    ids = batch(seed)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for one in optimizers:
        one.step()
        one.zero_grad()
    for one in schedules:
        one.step(1.0) if isinstance(one, ReduceLROnPlateau) else one.step()


def moments(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in optimizers:
        state = get_optimizer_state_dict(model, one, options=StateDictOptions(full_state_dict=True))["state"]
        found |= {f"{name} {key}": value.clone() for name, entries in state.items() for key, value in entries.items()}
    return found


def error_of(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def several_optimizers(folder: Path) -> list[str]:
    model = planned()
    optimizers = two_optimizers(model, 1e-2)
    schedules = three_schedules(optimizers, 0.5)
    trained(model, optimizers, 1, schedules)
    shardplan.save_training_state(model, optimizers, folder, schedulers=schedules, extra={"step": 1})
    expected = whole_state(model), moments(model, optimizers)
    for seed in (2, 3, 4):
        trained(model, optimizers, seed, schedules)
    further, rates = whole_state(model), [one.get_last_lr() for one in schedules]

    other = planned(noise=0.5, dp_shard=2, tp=1)
    others = two_optimizers(other, 3.0)
    again = three_schedules(others, 0.25)
    assert shardplan.load_training_state(other, others, folder, schedulers=again)["step"] == 1
    assert [g["lr"] for one in others for g in one.param_groups] == [7.5e-3, 3.75e-3, 1e-2]
    found = whole_state(other), moments(other, others)
    for left, right in zip(expected, found, strict=True):
        assert left.keys() == right.keys() and len(left) > 5
        wrong = [name for name, value in left.items() if not torch.equal(value, right[name])]
        assert not wrong, wrong
    for seed in (2, 3, 4):
        trained(other, others, seed, again)
    assert [one.get_last_lr() for one in again] == rates
    for name, value in whole_state(other).items():
        torch.testing.assert_close(value, further[name], rtol=1e-5, atol=1e-6)

    def save(given: Any, schedulers: Any = ()) -> str:
        return error_of(
            lambda: shardplan.save_training_state(model, given, folder, schedulers=schedulers, overwrite=True)
        )

    def load(given: Any, schedulers: Any = ()) -> str:
        return error_of(lambda: shardplan.load_training_state(model, given, folder, schedulers=schedulers))

    return [
        save([]),
        save({"a": optimizers[0]}),
        load([optimizers[0], None]),
        load(SimpleNamespace(optimizer=optimizers[0])),
        save(optimizers, [optimizers[0]]),
        save(optimizers, again),
        load(optimizers),
        load(optimizers, schedules[::-1]),
    ]


@pytest.mark.slow
def test_several_optimizers_are_saved_and_loaded_on_another_mesh(tmp_path):
    for said in on_ranks(2, several_optimizers, tmp_path / "state"):
        other = f"ValueError: {tmp_path / 'state'} has the schedules SequentialLR, MultiStepLR, ReduceLROnPlateau, and schedulers= are "
        those = "pass those that were saved, in their order"
        needed = "TypeError: optimizer must be a torch.optim.Optimizer or a list of them, not "
        assert said == [
            f"{needed}an empty list",
            f"{needed}a dict",
            f"{needed}a NoneType",
            f"{needed}a SimpleNamespace: pass its .optimizer",
            "TypeError: schedulers must be torch's LRScheduler or a list of them, not a SGD",
            "ValueError: a SequentialLR schedules an optimizer that was not passed: pass that optimizer too",
            f"{other}none: {those}",
            f"{other}ReduceLROnPlateau, MultiStepLR, SequentialLR: {those}",
        ]


MESHES: dict[str, dict[str, Any]] = {
    "tp": {"dp_shard": 1, "tp": 2},
    "pp": {"dp_shard": 1, "pp": 2},
    "ep": {"dp_shard": 2, "ep": 2},
    "cp": {"dp_shard": 1, "cp": 2},
}


def on_mesh(name: str) -> tuple[Any, list[torch.optim.Optimizer], list[LRScheduler]]:
    model = small_model("qwen3_moe", dtype=torch.float64, output_router_logits=False)
    options: dict[str, Any] = {
        "pp": {"pipeline": shardplan.PipelineOptions("1f1b", 2), "pipeline_parallel": {"layers": "model.layers.*"}}
    }
    planned = shardplan.apply_plan(
        model, shardplan.build_mesh(**MESHES[name]), "auto", prove=False, **options.get(name, {})
    )
    return planned, *two_optimizers_and_schedules(planned)


def two_optimizers_and_schedules(model: Any) -> tuple[list[torch.optim.Optimizer], list[LRScheduler]]:
    wide = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizers = [torch.optim.SGD(wide, lr=1e-2, momentum=0.9), torch.optim.AdamW(others, lr=1e-3)]
    first, second = optimizers
    return optimizers, [LinearLR(first, 0.25, total_iters=4), MultiStepLR(second, [2], gamma=0.5)]


def stepped(
    model: Any, optimizers: list[torch.optim.Optimizer], schedules: list[LRScheduler], seed: int, mesh: str = ""
) -> None:
    given = {"input_ids": batch(seed), "labels": batch(seed)}
    if mesh == "pp":
        model.step(**given, use_cache=False)
    else:
        with shardplan.context_parallel(model, **given) if mesh == "cp" else nullcontext(given) as own:
            model(**own, use_cache=False).loss.backward()
    for one in (*optimizers, *schedules):
        one.step()
    model.zero_grad()


def from_mesh_to_mesh(folder: Path) -> None:
    """A step on each mesh, which the next one reads and goes on from."""
    reference = small_model("qwen3_moe", dtype=torch.float64, output_router_logits=False)
    optimizers, schedules = two_optimizers_and_schedules(reference)
    names = [*MESHES, next(iter(MESHES))]
    for number, name in enumerate(names):
        model, own_optimizers, own_schedules = on_mesh(name)
        if number:
            shardplan.load_training_state(model, own_optimizers, folder, schedulers=own_schedules)
        stepped(model, own_optimizers, own_schedules, number, name)
        stepped(reference, optimizers, schedules, number)
        assert [one.get_last_lr() for one in own_schedules] == [one.get_last_lr() for one in schedules], name
        expected = dict(reference.named_parameters())
        for key, value in shardplan.full_parameters(model):
            assert relative_error(value, expected[key]) <= 1e-6, (name, key, relative_error(value, expected[key]))
        shardplan.save_training_state(model, own_optimizers, folder, schedulers=own_schedules, overwrite=True)


@pytest.mark.slow
def test_several_optimizers_and_schedules_go_on_from_mesh_to_mesh(tmp_path):
    on_ranks(2, from_mesh_to_mesh, tmp_path / "state")


def alone(folder: Path) -> list[str]:
    """The first rank begins; the others come when it has said for whom it waits."""
    model = planned()
    optimizer = torch.optim.AdamW(model.parameters())
    all_ranks.PATIENCE = 0.5
    calls = (
        lambda: shardplan.save_training_state(model, optimizer, folder / "state"),
        lambda: shardplan.load_training_state(model, optimizer, folder / "state"),
        lambda: shardplan.save_checkpoint(model, folder / "weights"),
        lambda: shardplan.load_checkpoint(model, folder / "weights"),
    )
    said = []
    for number, call in enumerate(calls):
        dist.barrier()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if dist.get_rank() == 1:
                time.sleep(1.5 if number % 2 == 0 else 0)
            call()
        said.append(" ".join(str(one.message) for one in caught if "waits" in str(one.message)))
    all_ranks.PATIENCE = 5.0
    return said


@pytest.mark.slow
def test_a_rank_that_waits_for_others_says_for_whom(tmp_path):
    first, second = on_ranks(2, alone, tmp_path)
    text = "{} waits on rank 0: rank 1 has not called it. Call it on all ranks, not under `if rank == 0:`"
    assert first == [text.format("save_training_state"), "", text.format("save_checkpoint"), ""]
    assert second == [""] * 4


def other_job(folder: Path) -> list[str]:
    """Two jobs that take turns are one process here, which forgets what it knew."""
    model = planned()
    optimizer = torch.optim.AdamW(model.parameters())
    first = dist.get_rank() == 0

    def store(step: int) -> None:
        shardplan.save_training_state(model, optimizer, folder, extra={"step": step}, overwrite=True)

    store(1)
    mine = dict(training_state._seen)
    store(2)
    assert (mine != training_state._seen) == first
    training_state._seen.clear()  # another job
    store(3)
    training_state._seen.clear()
    training_state._seen.update(mine)  # the first goes on
    said = [error_of(lambda: store(4))]
    assert shardplan.load_training_state(model, optimizer, folder)["step"] == 3
    store(5)

    read = training_state.dcp.load

    def replaced(*args: Any, **options: Any) -> None:
        read(*args, **options)
        dist.barrier()
        if first:
            shutil.copytree(folder, folder.with_name("other"))
            shutil.rmtree(folder)
            os.rename(folder.with_name("other"), folder)
            text = (folder / "checksums.json").read_text()
            (folder / "checksums.json").write_text(text + " ")
        dist.barrier()

    training_state.dcp.load = replaced
    said.append(error_of(lambda: shardplan.load_training_state(model, optimizer, folder)))
    training_state.dcp.load = read
    return said


@pytest.mark.slow
def test_a_job_whose_place_was_taken_raises_and_what_is_replaced_while_it_is_read_too(tmp_path):
    for said in on_ranks(2, other_job, tmp_path / "state"):
        assert "is not what this job last saved or loaded there: another job has saved it since" in said[0]
        assert "while it was being read: load it again" in said[1]
        assert all(text.startswith("RuntimeError") for text in said)


@pytest.mark.slow
def test_two_jobs_that_save_one_folder_leave_one_whole_state():
    """A few of the rounds of `python -m tests.two_writers`."""
    command = [sys.executable, "-m", "tests.two_writers", "--rounds", "20", "--seed", "1"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = dict(part.rsplit(" ", 1) for part in done.stdout.strip().splitlines()[-1].split(", "))
    assert counts["mixed"] == counts["lost"] == counts["older"] == counts["left"] == "0"
    kinds = {"rounds", "done", "killed", "ended by the other", "came after the other"}
    assert int(counts["ended by the other"]) > 0 and counts.keys() - kinds == {
        "mixed", "lost", "older", "left", "files of ended jobs"
    }, "no other error"  # fmt: skip
