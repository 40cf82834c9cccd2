"""Checkpoints: names and whole tensors are the unsharded model's, and what one mesh saves another loads."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from processes import on_ranks, raised
from small_models import batch, small_model, whole_state
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_
from training_runs import ADAMW, MAX_NORM

import shardplan
from shardplan.proof.compare import TOLERANCE, relative_error

MODELS = [("phi3", False), ("gpt2", True), ("qwen3", True), ("qwen3_moe", False)]
SHARED = [("qwen2_two_heads", False), ("phi3_one_head", False)]  # key-value heads on several ranks
SAMPLE, ALL = pytest.mark.slow, pytest.mark.exhaustive
MESHES = {
    "two by two": ((2, 2), ("dp_shard", "tp")),
    "one by four": ((1, 4), ("dp_shard", "tp")),
    "four by one": ((4, 1), ("dp_shard", "tp")),
    "tp alone": ((2, 2), ("pair", "tp")),  # both pairs do the same
}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # which is meant


def sharded(name: str, tied: bool, mesh: str, *, noise: float = 0.02, **options: Any) -> nn.Module:
    """A planned model; with another `noise` its weights are others."""
    shape, axes = MESHES[mesh]
    device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    device_mesh = device_mesh["tp"] if "pair" in axes else device_mesh
    model = small_model(name, tied=tied, noise=noise, **options)
    return shardplan.apply_plan(model, device_mesh, "auto", sequence_parallel=True, prove=False)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert one.keys() == other.keys()
    for name, value in other.items():
        assert torch.equal(one[name], value), name


def travel(name: str, tied: bool, folder: Path) -> None:
    """Weights go from mesh to mesh, by files and directly."""
    original = small_model(name, tied=tied)
    expected = {key: value.detach().clone() for key, value in original.state_dict().items()}
    ids = batch(5)
    loss = original(input_ids=ids, labels=ids, use_cache=False).loss.item()

    first = sharded(name, tied, "two by two")
    assert list(first.state_dict()) == list(expected)
    same(get_model_state_dict(first, options=StateDictOptions(full_state_dict=True)), expected)
    same(whole_state(first), expected)
    dcp.save(first.state_dict(), checkpoint_id=folder / "split")

    for mesh in MESHES:
        for source in ("split", "plain", "another mesh", "whole"):
            model = sharded(name, tied, mesh, noise=0.5)
            state = model.state_dict()
            if source == "another mesh":
                state = first.state_dict()
            elif source == "whole":
                state = expected
            else:
                dcp.load(state, checkpoint_id=folder / source)
            model.load_state_dict(state)
            same(whole_state(model), expected)
            # Rows in a wrong order on both ways would look right so far.
            assert model(input_ids=ids, labels=ids, use_cache=False).loss.item() == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "tied"),
    [pytest.param(*one, marks=SAMPLE if one == SHARED[0] else ALL) for one in (*MODELS, *SHARED)],
)
def test_weights_travel_between_meshes(name, tied, tmp_path):
    model = small_model(name, tied=tied)
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "plain", no_dist=True)
    on_ranks(4, travel, name, tied, tmp_path, seconds=300)
    state = small_model(name, tied=tied, noise=0.5).state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "split", no_dist=True)
    same(state, expected)


def whole_states(models: list[tuple[str, bool]]) -> list[dict[str, Tensor]]:
    return [whole_state(sharded(name, tied, "two by two")) for name, tied in models]


@pytest.mark.slow
def test_whole_states_are_the_originals():
    for rank in on_ranks(4, whole_states, MODELS):
        for (name, tied), state in zip(MODELS, rank, strict=True):
            same(state, dict(small_model(name, tied=tied).state_dict()))


# Optimizers


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rows: slice) -> None:
    """One training step on part of the step's batch of four rows."""
    ids = batch(number, rows=4)[rows]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    shardplan.applied(model).keep_checkpoints_portable(optimizer)
    return optimizer


def rows_on(mesh: str) -> slice:
    ranks = MESHES[mesh][0][0] if "dp_shard" in MESHES[mesh][1] else 1
    share = torch.distributed.get_rank() // (4 // ranks) if ranks > 1 else 0
    return slice(share * 4 // ranks, (share + 1) * 4 // ranks)


def saved(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, **options: Any) -> None:
    state = saved(model, optimizer)
    dcp.load(state, checkpoint_id=path, **options)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def continue_training(name: str, tied: bool, folder: Path) -> dict[str, dict[str, Tensor]]:
    """The weights after the second step, on each mesh, where the first was done elsewhere."""
    first = sharded(name, tied, "two by two", dtype=torch.float64)
    optimizer = optimizer_of(first)
    step(first, optimizer, 1, rows_on("two by two"))
    dcp.save(saved(first, optimizer), checkpoint_id=folder / "split")
    results = {}
    for mesh in MESHES:
        for source in ("split", "plain"):
            model = sharded(name, tied, mesh, noise=0.5, dtype=torch.float64)
            restore(model, own := optimizer_of(model), folder / source)
            step(model, own, 2, rows_on(mesh))
            results[f"{source} to {mesh}"] = whole_state(model)
        model = sharded(name, tied, mesh, noise=0.5, dtype=torch.float64)
        own = optimizer_of(model)
        model.load_state_dict(first.state_dict())
        own.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch does not copy what it loads
        step(model, own, 2, rows_on(mesh))
        results[f"directly to {mesh}"] = whole_state(model)
    return results


@pytest.mark.parametrize(
    ("name", "tied"),
    [pytest.param(*SHARED[1], marks=SAMPLE), *(pytest.param(*one, marks=ALL) for one in (*MODELS[:2], SHARED[0]))],
)
def test_optimizers_travel_with_their_weights(name, tied, tmp_path):
    model = small_model(name, tied=tied, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    step(model, optimizer, 1, slice(4))
    dcp.save(saved(model, optimizer), checkpoint_id=tmp_path / "plain", no_dist=True)
    step(model, optimizer, 2, slice(4))
    expected = whole_state(model)

    runs = on_ranks(4, continue_training, name, tied, tmp_path, seconds=300)

    again = small_model(name, tied=tied, dtype=torch.float64, noise=0.5)
    restore(again, own := torch.optim.AdamW(again.parameters(), **ADAMW), tmp_path / "split", no_dist=True)
    step(again, own, 2, slice(4))
    for rank, results in enumerate([*runs, {"split to one process": whole_state(again)}]):
        for way, state in results.items():
            assert state.keys() == expected.keys()
            for key, value in state.items():
                assert relative_error(value, expected[key]) <= TOLERANCE[torch.float64], (rank, way, key)


# What cannot be loaded


def refusals() -> dict[str, str]:
    """What loading damaged states into a packed model raises."""
    model = sharded("phi3", False, "two by two")
    good = {key: value.detach() for key, value in small_model("phi3").state_dict().items()}
    packed, plain = "model.layers.1.self_attn.qkv_proj.weight", "model.layers.0.mlp.down_proj.weight"
    damages: dict[str, dict[str, Any]] = {}
    for name in (packed, plain):
        damages[f"{name} too long"] = {**good, name: torch.cat([good[name], good[name][:1]])}
        damages[f"{name} turned"] = {**good, name: good[name].T}
        damages[f"{name} missing"] = {key: value for key, value in good.items() if key != name}
        damages[f"{name} no tensor"] = {**good, name: "weights"}
    said = {damage: raised(model.load_state_dict, state) for damage, state in damages.items()}
    model.load_state_dict(good)
    same(whole_state(model), good)
    return said


def test_what_cannot_be_loaded_is_named_on_every_rank():
    for said in on_ranks(4, refusals):
        assert len(said) == 8
        for damage, text in said.items():
            assert damage.split()[0] in text, (damage, text)
