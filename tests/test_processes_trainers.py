"""examples/trainer.py and examples/accelerate_loop.py: other projects' loops around a planned model, on 4 processes."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from processes import on_ranks
from small_models import small_model
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import shardplan
from shardplan.compat import adopt

ROOT = Path(__file__).parent.parent
STEPS = 4


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def losses(name: str, folder: Path, *words: str) -> list[float]:
    """What the example logs."""
    script, file = example(name), folder / "losses"
    text = str(ROOT / "demo/text.txt")
    given = ["--text", text, "--steps", str(STEPS), "--seq-len", "64", "--losses", str(file), *words]
    script.train(script.arguments(given))
    return [json.loads(line)["loss"] for line in file.read_text().splitlines()] if file.exists() else []


def as_torchrun() -> None:
    """What torchrun says to its processes, and no state of an earlier run."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    AcceleratorState._reset_state()
    PartialState._reset_state()


def on_this_rank(name: str, folder: str, *words: str) -> list[float]:
    as_torchrun()
    return losses(name, Path(folder), *words)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("trainer", ("--tp", "2", "--sequence-parallel"), marks=pytest.mark.slow),
        ("accelerate_loop", ("--tp", "2", "--sequence-parallel")),
        pytest.param("trainer", ("--tp", "1"), marks=pytest.mark.slow),
        pytest.param("accelerate_loop", ("--tp", "4"), marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "".join(value),
)
@pytest.mark.slow
def test_the_losses_are_those_of_the_unsharded_model(name, words, tmp_path):
    outputs = {one: ("--output", str(tmp_path / one)) if name == "trainer" else () for one in ("sharded", "whole")}
    (tmp_path / "one").mkdir()
    found, *_ = on_ranks(4, on_this_rank, name, str(tmp_path), *words, *outputs["sharded"], seconds=240)
    wanted = losses(name, tmp_path / "one", *outputs["whole"])
    assert len(found) == STEPS and found == pytest.approx(wanted, rel=2e-5)
    if name == "trainer":
        sharded, whole = (AutoModelForCausalLM.from_pretrained(tmp_path / one) for one in ("sharded", "whole"))
        for key, value in whole.state_dict().items():
            torch.testing.assert_close(sharded.state_dict()[key], value, rtol=1e-3, atol=1e-4)


def refuse(folder: str) -> None:
    as_torchrun()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    model = shardplan.apply_plan(small_model("llama"), mesh, "auto", prove=False)
    accelerator = Accelerator(cpu=True)
    with pytest.raises(TypeError, match="not a Linear"):
        adopt(torch.nn.Linear(1, 1), model)
    with pytest.raises(ValueError, match="no plan was applied"):
        adopt(accelerator, small_model("llama"))
    with pytest.raises(ValueError, match="does not know the mesh axis 'data'"):
        adopt(accelerator, shardplan.apply_plan(small_model("llama"), other, "auto", prove=False))
    given = {"output_dir": folder, "use_cpu": True, "report_to": []}
    trainer = Trainer(small_model("llama"), TrainingArguments(**given, save_strategy="no"))
    with pytest.raises(ValueError, match="made with another model"):
        adopt(trainer, model)
    with pytest.raises(ValueError, match="save_only_model=True"):
        adopt(Trainer(model, TrainingArguments(**given)), model)


def test_what_does_not_fit_is_refused(tmp_path):
    on_ranks(4, refuse, str(tmp_path))
