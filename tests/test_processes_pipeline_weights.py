"""Weights and training state of pipelines in real processes: read, written, and read again on another mesh."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_runs import GPT2, LLAMA, STEPS, Recipe, Step, check, optimizer_of, pipeline_of, steps_of, unsharded
from processes import on_ranks
from safetensors.torch import load_file
from small_models import meta_model, small_model
from torch import Tensor, nn
from training_runs import ADAMW

import shardplan
from shardplan.weights.materialize import initialize

TIED = Recipe("qwen2", {"pp": 2, "dp_shard": 2}, tied=True)
CASES = {
    "llama": (replace(TIED, model="llama", tied=False), {}),
    "tied, interleaved": (replace(TIED, schedule="interleaved"), {}),
    "packed, tp": (Recipe("gpt2", {"pp": 2, "tp": 2}, tied=True, section=GPT2), {"n_layer": 4}),
    "experts": (Recipe("qwen3_moe", {"pp": 2, "dp_shard": 2}, schedule="interleaved"), {"output_router_logits": False}),
}


def on_meta(recipe: Recipe, settings: dict[str, Any]) -> shardplan.Pipeline:
    model = meta_model(recipe.model, tied=recipe.tied, **{"num_hidden_layers": 4, **settings})
    mesh = shardplan.build_mesh(**recipe.sizes)
    return shardplan.apply_plan(
        model,
        mesh,
        "auto",
        pipeline=shardplan.PipelineOptions(recipe.schedule, micro_batches=4),
        pipeline_parallel=dict(recipe.section),
        prove=False,
    )


def read_and_write(recipe: Recipe, settings: dict[str, Any], folder: str, written: str) -> dict[str, Any]:
    pipeline = on_meta(recipe, settings)
    loaded = shardplan.load_checkpoint(pipeline, folder)
    parameters = dict(shardplan.full_parameters(pipeline))
    shardplan.save_checkpoint(pipeline, written, max_shard_size="50KB")
    given = dict(shardplan.full_parameters(pipeline, names="checkpoint", ranks=[1, 3]))
    if dist.get_rank() in (1, 3):
        saved = {key: value for file in Path(written).glob("*.safetensors") for key, value in load_file(file).items()}
        assert given.keys() == saved.keys() and all(torch.equal(value, saved[key]) for key, value in given.items())
    else:
        assert not given
    return {"read": loaded.read, "stored": loaded.stored, "parameters": parameters}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_folder_is_read_and_written(name: str, tmp_path: Path) -> None:
    recipe, settings = CASES[name]
    model = small_model(recipe.model, tied=recipe.tied, **{"num_hidden_layers": 4, **settings})
    model.save_pretrained(tmp_path / "from")
    runs = on_ranks(4, read_and_write, recipe, settings, str(tmp_path / "from"), str(tmp_path / "to"))
    expected = dict(model.named_parameters())
    for run in runs:
        assert list(run["parameters"]) == list(expected)
        for parameter, value in run["parameters"].items():
            assert torch.equal(value, expected[parameter]), parameter
        assert run["read"] < 0.7 * run["stored"]
    before, after = tensors(tmp_path / "from"), tensors(tmp_path / "to")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    again = type(model).from_pretrained(tmp_path / "to")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def tensors(folder: Path) -> dict[str, Tensor]:
    return {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}


def drawn(recipe: Recipe, settings: dict[str, Any]) -> dict[str, Tensor]:
    pipeline = on_meta(recipe, settings)
    torch.manual_seed(5)
    shardplan.materialize(pipeline, "cpu")
    return dict(shardplan.full_parameters(pipeline))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "tied, interleaved", "packed, tp"])
def test_random_weights_are_those_of_the_whole_model(name: str) -> None:
    recipe, settings = CASES[name]
    runs = on_ranks(4, drawn, recipe, settings)
    model = meta_model(recipe.model, tied=recipe.tied, **{"num_hidden_layers": 4, **settings})
    torch.manual_seed(5)
    model.to_empty(device="cpu")
    with torch.no_grad():
        initialize(model, {}, torch.device("cpu"))
    model.tie_weights()
    for run in runs:
        for parameter, value in model.named_parameters():
            assert torch.equal(run[parameter], value), parameter


# Training state


def first_steps(recipe: Recipe, folder: str) -> None:
    pipeline = pipeline_of(recipe)
    optimizer = optimizer_of(recipe, pipeline)
    steps_of(recipe, pipeline, optimizer, range(1))
    shardplan.save_training_state(pipeline, optimizer, folder, extra={"step": 1})


def other_steps(recipe: Recipe, folder: str) -> list[Any]:
    pipeline = pipeline_of(recipe)
    optimizer = optimizer_of(recipe, pipeline)
    assert shardplan.load_training_state(pipeline, optimizer, folder) == {"step": 1}
    return steps_of(recipe, pipeline, optimizer, range(1, STEPS))


def plain(recipe: Recipe) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = recipe.build()
    mesh = shardplan.build_mesh(dp_shard=recipe.ranks)
    shardplan.apply_plan(model, mesh, "auto", prove=False)
    return model, torch.optim.AdamW(model.parameters(), **ADAMW)


def as_whole_model(recipe: Recipe, folder: str, written: str) -> dict[str, Tensor]:
    model, optimizer = plain(recipe)
    shardplan.load_training_state(model, optimizer, folder)
    shardplan.save_training_state(model, optimizer, written, extra={"step": 1})
    return dict(shardplan.full_parameters(model))


LATER = {"another mesh": {"pp": 2, "tp": 2}, "more stages": {"pp": 4}}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_training_goes_on_at_any_pp(tied: bool, tmp_path: Path) -> None:
    recipe = replace(LLAMA_OR_TIED[tied], sizes={"pp": 2, "dp_shard": 2}, rows=8)
    folder, copied = str(tmp_path / "state"), str(tmp_path / "copied")
    on_ranks(4, first_steps, recipe, folder)
    whole = on_ranks(4, as_whole_model, recipe, folder, copied)
    expected = unsharded(recipe)
    for run in whole:
        for name, value in run.items():
            assert torch.allclose(value, expected[0].parameters[name], rtol=0, atol=1e-7), name
    again = {"interleaved": replace(recipe, schedule="interleaved"), "the same": recipe}
    for other in again.values():
        for source in (folder, copied):
            check(other, on_ranks(4, other_steps, other, source), expected[1:])


def then_another_mesh(recipe: Recipe, folder: str) -> list[Step]:
    pipeline = pipeline_of(recipe)
    optimizer = optimizer_of(recipe, pipeline)
    steps = steps_of(recipe, pipeline, optimizer, range(1))
    shardplan.save_training_state(pipeline, optimizer, f"{folder}/state")
    shardplan.save_checkpoint(pipeline, f"{folder}/weights")
    mesh, rank = shardplan.build_mesh(dp_shard=2, tp=2), torch.full((1,), dist.get_rank())
    for axis, sums in (("dp_shard", (2, 4, 2, 4)), ("tp", (1, 1, 5, 5))):
        total = rank.clone()
        dist.all_reduce(total, group=mesh.get_group(axis))
        assert total.item() == sums[rank.item()], axis
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("dense", [[0, 1], [2, 3]], ids=["the last stage", "the first stage"])
def test_a_mesh_is_made_where_one_stage_alone_had_experts(dense: list[int], tmp_path: Path) -> None:
    """Ranks with other numbers of process groups wait for each other in `new_group`."""
    settings = {"mlp_only_layers": dense, "output_router_logits": False}
    recipe = Recipe("qwen3_moe", {"pp": 2, "dp_shard": 2, "ep": 2}, settings=settings)
    check(recipe, on_ranks(4, then_another_mesh, recipe, str(tmp_path), seconds=60.0), unsharded(recipe)[:1])


LLAMA_OR_TIED = {False: replace(LLAMA_RECIPE := Recipe("llama", {"pp": 2}, section=LLAMA)), True: TIED}


@pytest.mark.slow
@pytest.mark.parametrize("name", LATER)
def test_training_goes_on_with_other_replicas(name: str, tmp_path: Path) -> None:
    recipe = replace(TIED, sizes={"pp": 2}, rows=8)
    on_ranks(2, first_steps, recipe, str(tmp_path / "state"))
    later = replace(recipe, sizes=LATER[name], sequence_parallel="tp" in LATER[name])
    runs = on_ranks(4, other_steps, later, str(tmp_path / "state"))
    check(later, runs, unsharded(recipe)[1:])


# Random numbers

DROPPING = Recipe(
    "gpt2",
    {"pp": 2, "tp": 2},
    section=GPT2,
    settings={"n_layer": 4, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    sequence_parallel=True,
    tied=True,
    schedule="interleaved",
)


def without_stop(recipe: Recipe, folder: str) -> list[dict[str, Tensor]]:
    torch.manual_seed(9)
    pipeline = pipeline_of(recipe)
    optimizer = optimizer_of(recipe, pipeline)
    found = [steps_of(recipe, pipeline, optimizer, range(1))]
    shardplan.save_training_state(pipeline, optimizer, folder, extra={"step": 1})
    found.append(steps_of(recipe, pipeline, optimizer, range(1, STEPS)))
    return [step.parameters for steps in found for step in steps]


def again(recipe: Recipe, folder: str) -> list[dict[str, Tensor]]:
    torch.manual_seed(10)  # the place of the random numbers is read
    return [step.parameters for step in other_steps(recipe, folder)]


@pytest.mark.slow
def test_dropout_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = on_ranks(4, without_stop, DROPPING, str(tmp_path / "state"))
    resumed = on_ranks(4, again, DROPPING, str(tmp_path / "state"))
    for one, other in zip(whole, resumed, strict=True):
        for step, right in zip(other, one[1:], strict=True):
            assert all(torch.equal(step[name], right[name]) for name in right)
