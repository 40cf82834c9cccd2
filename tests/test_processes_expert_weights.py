"""Checkpoints of models with distributed experts: what one mesh writes, with ep or without, another reads, and transformers too."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from expert_runs import Case, batch, build, of, planned
from processes import on_ranks
from safetensors.torch import load_file
from small_models import share_of, whole_state
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from training_runs import ADAMW
from transformers import AutoModelForCausalLM

import shardplan
from shardplan.proof.compare import TOLERANCE, relative_error

SIZES = {
    "ep 2": {"dp_shard": 4, "ep": 2},
    "ep 4": {"dp_shard": 4, "ep": 4},
    "ep 4 over tp": {"dp_shard": 2, "tp": 2, "ep": 4},
    "tp 2 without ep": {"dp_shard": 2, "tp": 2},
}
MORE_SIZES = {
    "ep 2": SIZES["ep 2"],
    "replicas": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    "tp 2": SIZES["tp 2 without ep"],
}


@dataclass(frozen=True)
class Journey:
    """A model that goes from its first mesh to each."""

    model: str
    meshes: Mapping[str, dict[str, int]] = field(default_factory=lambda: SIZES)
    settings: tuple[tuple[str, Any], ...] = ()

    def case(self, mesh: str | None = None, change: Callable[[nn.Module], None] | None = None) -> Case:
        return replace(of(self.model, **self.meshes.get(mesh, {})), settings=self.settings, change=change)


def moved(model: nn.Module) -> None:
    """Other weights, on every rank the same."""
    for parameter in model.parameters():
        parameter.mul_(2.0).add_(0.1)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert one.keys() == other.keys()
    for name, value in other.items():
        assert torch.equal(one[name], value), name


def travel(journey: Journey, folder: Path) -> None:
    expected = {key: value.detach().clone() for key, value in build(journey.case()).state_dict().items()}
    first, _ = planned(journey.case("ep 2"))
    same(whole_state(first), expected)
    same(get_model_state_dict(first, options=StateDictOptions(full_state_dict=True)), expected)
    values = {key: value.clone() for key, value in shardplan.full_parameters(first)}
    same(values, {key: value for key, value in expected.items() if key in values})
    shardplan.save_checkpoint(first, folder / "ep 2", max_shard_size="40KB")
    given = {key: value.clone() for key, value in shardplan.full_parameters(first, names="checkpoint")}
    same(
        given, {key: value for one in (folder / "ep 2").glob("*.safetensors") for key, value in load_file(one).items()}
    )
    dcp.save(first.state_dict(), checkpoint_id=folder / "split")
    for mesh in journey.meshes:
        for source in ("saved", "split", "another mesh", "whole"):
            model, _ = planned(journey.case(mesh, moved))
            if source == "saved":
                loaded = shardplan.load_checkpoint(model, folder / "ep 2")
                assert loaded.missing == loaded.unexpected == (), mesh
            elif source == "split":
                dcp.load(state := model.state_dict(), checkpoint_id=folder / "split")
                model.load_state_dict(state)
            else:
                model.load_state_dict(expected if source == "whole" else first.state_dict())
            same(whole_state(model), expected)
        if mesh != "ep 2":  # what other meshes write is the same too
            shardplan.save_checkpoint(model, folder / mesh, max_shard_size="40KB")


JOURNEYS = [
    pytest.param(Journey("mixtral"), id="mixtral", marks=pytest.mark.exhaustive),
    # An expert on each ep rank, which ep_shard splits along another dim.
    pytest.param(Journey("mixtral", MORE_SIZES, (("num_local_experts", 2),)), id="two experts"),
    pytest.param(Journey("gpt_oss"), id="gpt_oss", marks=pytest.mark.exhaustive),
    pytest.param(Journey("deepseek_v3"), id="deepseek_v3", marks=pytest.mark.exhaustive),
]


@pytest.mark.slow
@pytest.mark.parametrize("journey", JOURNEYS)
def test_weights_travel(journey, tmp_path):
    on_ranks(4, travel, journey, tmp_path)
    expected = build(journey.case()).state_dict()
    for folder in journey.meshes:
        read, report = AutoModelForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(report.values()), report
        same(read.state_dict(), expected)


def empty(case: Case) -> nn.Module:
    config = build(case).config
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def from_meta(folder: Path) -> None:
    """A model that is whole on no rank: built without memory, then loaded, or initialised as its own code does it."""
    case = of("mixtral", dp_shard=2, ep=2)
    first, mesh = planned(case)
    shardplan.save_checkpoint(first, folder / "saved")
    model = shardplan.apply_plan(empty(case), mesh, "mixtral", prove=False)
    shardplan.load_checkpoint(model, folder / "saved")
    same(whole_state(model), whole_state(first))

    drawn, expected = (
        shardplan.apply_plan(empty(case), mesh, "mixtral", prove=False),
        empty(case).to_empty(device="cpu"),
    )
    torch.manual_seed(3)
    shardplan.materialize(drawn, "cpu")
    torch.manual_seed(3)
    with torch.no_grad():
        expected.initialize_weights()
    same(whole_state(drawn), dict(expected.state_dict()))
    same(dict(drawn.named_buffers()), dict(expected.named_buffers()))


def test_two_ranks_load_what_was_saved(tmp_path):
    on_ranks(2, from_meta, tmp_path)


# Optimizers


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, batches: list[int]) -> None:
    """One step on the mean loss of these batches."""
    for one in batches:
        ids = batch(number, one)
        (model(input_ids=ids, labels=ids, use_cache=False).loss / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **ADAMW)


def batches_of(mesh: DeviceMesh) -> list[int]:
    """This rank's of four."""
    own, data_ranks = share_of(mesh)
    return list(range(own * 4 // data_ranks, (own + 1) * 4 // data_ranks))


def continued(name: str, folder: Path) -> dict[str, dict[str, Tensor]]:
    """The weights after the second step, on each mesh, where the first was done at ep 2."""

    def case(sizes: dict[str, int], change: Callable[[nn.Module], None] | None = None) -> Case:
        return replace(of(name, **sizes), dtype=torch.float64, change=change)

    first, mesh = planned(case(SIZES["ep 2"]))
    optimizer = optimizer_of(first)
    shardplan.applied(first).keep_checkpoints_portable(optimizer)
    trained(first, optimizer, 1, batches_of(mesh))
    weights, moments = get_state_dict(first, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / "dcp")
    shardplan.save_training_state(first, optimizer, folder / "ours")

    results = {}
    for on, sizes in SIZES.items():
        for source in ("dcp", "ours", "directly"):
            model, mesh = planned(case(sizes, moved))
            own = optimizer_of(model)
            if source == "ours":
                shardplan.load_training_state(model, own, folder / "ours")
            elif source == "dcp":
                shardplan.applied(model).keep_checkpoints_portable(own)
                weights, moments = get_state_dict(model, own)
                dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder / "dcp")
                set_state_dict(model, own, model_state_dict=weights, optim_state_dict=moments)
            else:
                shardplan.applied(model).keep_checkpoints_portable(own)
                model.load_state_dict(first.state_dict())
                own.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch does not copy what it loads
            trained(model, own, 2, batches_of(mesh))
            results[f"{source} to {on}"] = whole_state(model)
    return results


@pytest.mark.slow
def test_optimizers_travel(tmp_path):
    name = "mixtral"
    model = build(replace(of(name), dtype=torch.float64))
    optimizer = optimizer_of(model)
    for number in (1, 2):
        trained(model, optimizer, number, [0, 1, 2, 3])
    expected = whole_state(model)
    for rank, results in enumerate(on_ranks(4, continued, name, tmp_path)):
        for way, state in results.items():
            assert state.keys() == expected.keys()
            for key, value in state.items():
                assert relative_error(value, expected[key]) <= TOLERANCE[torch.float64], (rank, way, key)
