"""What one mesh of four ranks writes, every other reads: weights and training states, bit for bit.

Steps need no forward: gradients are a function of each element of the weights, and AdamW steps element by element, so that every mesh has
the numbers of the unsharded model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copytree
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from expert_runs import SETTINGS, build, of
from processes import on_ranks
from safetensors.torch import load_file, save_file
from small_models import small_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import shardplan
from shardplan.runtime.apply.applied import was_touched

MESHES: Mapping[str, dict[str, int]] = {
    "tp 4": {"tp": 4},
    "tp 2, dp 2": {"dp_shard": 2, "tp": 2},
    "ep 2, dp 2": {"dp_shard": 4, "ep": 2},
    "ep 2, tp 2": {"dp_shard": 2, "tp": 2, "ep": 2},
    "ep 4, tp 2": {"dp_shard": 2, "tp": 2, "ep": 4},
    "pp 2, tp 2": {"pp": 2, "tp": 2},
    "pp 2, dp 2": {"pp": 2, "dp_shard": 2},
    "cp 2, dp 2": {"dp_shard": 2, "cp": 2},
    "cp 2, tp 2": {"cp": 2, "tp": 2},
    "dp 4": {"dp_shard": 4},
    "replicas": {"dp_replicate": 2, "dp_shard": 2},
}
STEPS = 2
MISSING, UNEXPECTED = "model.norm.weight", "model.other.weight"
Model = nn.Module | shardplan.Pipeline


def adapted(model: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    targets = ["q_proj", "v_proj", "down_proj", "lm_head"]
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))


@dataclass(frozen=True)
class Kind:
    """A model, of four key-value heads, so that tp 4 divides them.

    Args:
        tied, settings: of its configuration.
        change: done to the unsharded model.
        without: axes that its plan has not.
        weights: whether `load_checkpoint` takes it.
    """

    model: str
    settings: tuple[tuple[str, Any], ...] = ()
    tied: bool = False
    change: Callable[[nn.Module], nn.Module] | None = None
    without: frozenset[str] = frozenset()
    weights: bool = True

    def build(self, device: str = "cpu") -> nn.Module:
        if self.model in SETTINGS:
            model = build(replace(of(self.model), settings=(("num_key_value_heads", 4), *self.settings)))
        else:
            model = small_model(self.model, tied=self.tied, num_hidden_layers=2, num_key_value_heads=4)
        if device == "meta":
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(model.config)
        return self.change(model) if self.change is not None else model

    def fits(self, mesh: str) -> bool:
        return not self.without & MESHES[mesh].keys()


DENSE = frozenset({"ep"})
TIES = (("tie_word_embeddings", True),)
KINDS = {
    "experts": Kind("mixtral"),
    "experts, tied": Kind("qwen3_moe", TIES),
    "tied": Kind("llama", tied=True, without=DENSE),
    "packed": Kind("phi3", without=DENSE),
    "adapters": Kind("llama", change=adapted, without=DENSE | {"pp"}, weights=False),
}


class Meshes(dict[str, Any]):
    """Each is made once."""

    def __missing__(self, name: str) -> Any:
        self[name] = shardplan.build_mesh(**MESHES[name])
        return self[name]


def planned(kind: Kind, meshes: Meshes, mesh: str, device: str = "cpu") -> Model:
    model = kind.build(device)
    stages = {"pipeline": shardplan.PipelineOptions("1f1b", 4), "pipeline_parallel": {"layers": "model.layers.*"}}
    given = stages if "pp" in MESHES[mesh] else {}
    return shardplan.apply_plan(
        model, meshes[mesh], "auto" if "cp" in MESHES[mesh] else kind.model, **given, prove=False
    )


def stepped(model: Model, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
    for _ in range(steps):
        for parameter in trained(model):
            parameter.grad = parameter.detach() * 0.5 + 0.01
        optimizer.step()
    optimizer.zero_grad()


def trained(model: Model) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def optimizer_of(model: Model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained(model), lr=1e-2)


def whole(model: Model) -> dict[str, Tensor]:
    if isinstance(model, shardplan.Pipeline) or was_touched(model):
        return {name: value.clone() for name, value in shardplan.full_parameters(model)}
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@torch.no_grad()
def numbers(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Whole weights, and whole tensors of the optimizer under their names: each is put in the place of the weights, and read."""
    found = {"weights": whole(model)}
    assert {optimizer.state[parameter]["step"].item() for parameter in trained(model)} == {STEPS}
    for key in ("exp_avg", "exp_avg_sq"):
        for parameter in trained(model):
            parameter.copy_(optimizer.state[parameter][key])
        found[key] = whole(model)  # with the frozen ones
    return found


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    wrong = [name for name, value in expected.items() if not torch.equal(found[name], value.to(dtype or value.dtype))]
    assert not wrong, wrong


def travel(kind: Kind, sources: list[str], targets: list[str], folder: Path) -> None:
    """Save on each of some meshes, and read on the others. Meshes and programs are made once for all of them."""
    meshes = Meshes()
    reference = kind.build()
    stepped(reference, right := optimizer_of(reference))
    expected = numbers(reference, right)
    for number, source in enumerate(sources):
        save(kind, meshes, source, folder / f"{number}", expected)
        for target in targets:
            arrive(kind, meshes, target, folder / f"{number}", expected)
            if dist.get_rank() == 0:
                print(f"{source} -> {target}", flush=True)


def save(kind: Kind, meshes: Meshes, source: str, folder: Path, expected: Mapping[str, Mapping[str, Tensor]]) -> None:
    folder.mkdir(exist_ok=True)
    model = planned(kind, meshes, source)
    stepped(model, optimizer := optimizer_of(model))
    same(whole(model), expected["weights"])
    shardplan.save_training_state(model, optimizer, folder / "state", extra={"step": STEPS})
    if kind.weights:
        shardplan.save_checkpoint(model, folder / "weights", max_shard_size="1GB")
        if dist.get_rank() == 0:
            partial(folder / "weights", folder / "partial")
        dist.barrier()


def partial(folder: Path, to: Path) -> None:
    """A checkpoint that lacks a tensor and has another."""
    copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    tensors[UNEXPECTED] = tensors.pop(MISSING)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})


def arrive(
    kind: Kind,
    meshes: Meshes,
    target: str,
    folder: Path,
    expected: Mapping[str, Mapping[str, Tensor]],
) -> None:
    weights = expected["weights"]
    model = planned(kind, meshes, target, "meta" if kind.weights else "cpu")
    if kind.weights:
        loaded = shardplan.load_checkpoint(model, folder / "weights", progress=False)
        assert loaded.missing == loaded.unexpected == ()
        same(whole(model), weights)
        change(model)
        before = whole(model)
        with pytest.raises((ValueError, RuntimeError), match=UNEXPECTED.replace(".", r"\.")):
            shardplan.load_checkpoint(model, folder / "partial", progress=False)
        same(whole(model), before)
        loaded = shardplan.load_checkpoint(model, folder / "partial", strict=False, progress=False)
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, (loaded.missing, loaded.unexpected))  # a stage misses what is its own
        assert {name for missing, _ in every for name in missing} == {MISSING}, every
        assert {unexpected for _, unexpected in every} == {(UNEXPECTED,)}, every
        same(whole(model), {**weights, MISSING: before[MISSING]})
    change(model)
    optimizer = optimizer_of(model)
    assert shardplan.load_training_state(model, optimizer, folder / "state") == {"step": STEPS}
    found = numbers(model, optimizer)
    for key, values in expected.items():
        same(found[key], values)
    if kind.weights:
        shardplan.load_checkpoint(model, folder / "weights", dtype=torch.bfloat16, progress=False)
        same(whole(model), weights, torch.bfloat16)


@torch.no_grad()
def change(model: Model) -> None:
    """Weights that a load must replace."""
    for parameter in model.parameters():
        parameter.mul_(2.0).add_(0.1)


SAMPLE = [
    ("experts, tied", "ep 4, tp 2", "pp 2, dp 2"),
    ("experts, tied", "ep 2, dp 2", "cp 2, dp 2"),
    ("tied", "pp 2, dp 2", "cp 2, tp 2"),
    ("packed", "tp 4", "pp 2, tp 2"),
    ("adapters", "dp 4", "tp 2, dp 2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "source", "target"), SAMPLE)
def test_a_pair(kind: str, source: str, target: str, tmp_path: Path) -> None:
    on_ranks(4, travel, KINDS[kind], [source], [target], tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_every_pair(kind: str, tmp_path: Path) -> None:
    meshes = [mesh for mesh in MESHES if KINDS[kind].fits(mesh)]
    on_ranks(4, travel, KINDS[kind], meshes, meshes, tmp_path, seconds=3600.0)
