"""Muon on planned models in real processes, against torch.optim.Muon of the unsharded model."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from optimizer_runs import Run, given_gradients, muon, newton_schulz, same, trained
from processes import on_ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import shardplan
from shardplan.proof.compare import relative_error

pytestmark = pytest.mark.slow
LIMIT, DOUBLE = 1e-4, {"dtype": torch.float64}  # of the update of three steps
PLAIN = {**DOUBLE, "output_router_logits": False}  # its term of the loss is no mean over tokens


def share_of(model) -> int:
    mesh = (model.layout.mesh if isinstance(model, shardplan.Pipeline) else shardplan.applied(model).mesh).mesh
    names = mesh.mesh_dim_names or ()
    return mesh.get_local_rank("dp_shard") if "dp_shard" in names else 0


def given(runs: list[Run]):
    return [given_gradients(run.planned(), run) for run in runs]


def steps(runs: list[Run]) -> list[dict[str, float]]:
    """How far the updates of three real steps are from those of the unsharded model."""
    found = []
    for run in runs:
        model = run.planned()
        values = trained(
            model,
            muon(model, whole_matrix=newton_schulz),
            run,
            share_of(model),
            run.shares,
            isinstance(model, shardplan.Pipeline),
        )
        plain = run.build()
        before = {name: p.detach().clone() for name, p in plain.named_parameters()}
        expected = trained(plain, muon(plain, whole_matrix=newton_schulz), run, 0, 0)
        found.append(
            {
                name: relative_error(values[name] - before[name], value - before[name])
                for name, value in expected.items()
            }
        )
    return found


def test_stages_and_experts_have_the_same_update_given_the_same_gradients():
    runs = [Run("llama", {"pp": 2}), Run("qwen3_moe", {"dp_shard": 2, "ep": 2}), Run("mixtral", {"tp": 2, "ep": 2})]
    for run, found in zip(runs, zip(*on_ranks(2, given, runs), strict=True), strict=True):
        same(run, list(found))


def test_three_real_steps_of_two_ranks():
    runs = [
        Run("phi3", {"tp": 2}, {"sequence_parallel": True}, settings=DOUBLE),
        Run("qwen3_moe", {"dp_shard": 2, "ep": 2}, settings=PLAIN),
        Run("llama", {"pp": 2}, settings=DOUBLE),
    ]
    for found in on_ranks(2, steps, runs):
        for run, errors in zip(runs, found, strict=True):
            wrong = {name: error for name, error in errors.items() if error > LIMIT}
            assert not wrong, (run, wrong)


def a_state_is_read_on_another_mesh(folder: Path) -> None:
    first, second = Run("phi3", {"tp": 2}), Run("phi3", {"dp_shard": 2})
    model = first.planned()
    optimizer = muon(model)
    trained(model, optimizer, first, 0, 1)
    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.01, 0.002  # as a schedule leaves them
    shardplan.save_training_state(model, optimizer, folder)

    other = second.planned()
    again = muon(other)
    shardplan.load_training_state(other, again, folder)
    whole = partial(get_optimizer_state_dict, options=StateDictOptions(full_state_dict=True))
    expected, state = whole(model, optimizer)["state"], whole(other, again)["state"]
    if dist.get_rank() == 0:
        assert state.keys() == expected.keys()
        assert {"momentum_buffer"} in [set(one) for one in state.values()] and {"step", "exp_avg", "exp_avg_sq"} in [
            set(one) for one in state.values()
        ]
        for name, entries in expected.items():
            for key, value in entries.items():
                assert torch.equal(state[name][key], value), (name, key)
    assert [group["lr"] for group in again.param_groups] == [0.01, 0.002]
    assert all(again._rest.state[p] is again.state[p] for group in again._rest.param_groups for p in group["params"])
    buffer = again.state[again.param_groups[0]["params"][0]]["momentum_buffer"]
    assert buffer.placements == again.param_groups[0]["params"][0].placements
    # The loaded rates and moments are those that both parts step with.
    for one, run in ((optimizer, model), (again, other)):
        for parameter in run.parameters():
            parameter.grad = torch.zeros_like(parameter)
        one.step()
    left, right = (dict(shardplan.full_parameters(run)) for run in (model, other))
    for name, value in left.items():
        assert relative_error(right[name], value) < 1e-5, name


def test_the_training_state_is_read_on_another_mesh(tmp_path):
    on_ranks(2, a_state_is_read_on_another_mesh, tmp_path / "state")
