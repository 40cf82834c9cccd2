"""Experts over the ep axis under FSDP2, in real processes: every gradient, the norm, the optimizer and checkpoints, against the
unsharded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import on_ranks
from small_models import whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import clip_grad_norm_ as torch_clip_grad_norm_
from training_runs import ADAMW

from shardplan import load_checkpoint, micro_batches, save_checkpoint
from shardplan.proof.compare import relative_error
from shardplan.runtime.training import clip_grad_norm_, get_grad_norm
from tests.expert_stacks import Case, batch, sharded, share_of

MAX_NORM, LIMIT = 0.05, 1e-5
CASES = {
    "dp 4, ep 2": Case({"dp_shard": 4, "ep": 2}),
    "dp 4, ep 4": Case({"dp_shard": 4, "ep": 4}),
    "dp 2, tp 2, ep 2": Case({"dp_shard": 2, "tp": 2, "ep": 2}),
    "dp 2, tp 2, ep 4": Case({"dp_shard": 2, "tp": 2, "ep": 4}),
    "tp 4, ep 2": Case({"dp_shard": 1, "tp": 4, "ep": 2}),
}
MORE = {
    "tp 4, ep 4, no FSDP": Case({"dp_shard": 1, "tp": 4, "ep": 4}, section=False),
    "cp 2, tp 2, ep 4": Case({"dp_shard": 1, "cp": 2, "tp": 2, "ep": 4}),
    "replicas 2, dp 2, ep 2": Case({"dp_replicate": 2, "dp_shard": 2, "ep": 2}),
    "replicas 2, tp 2, ep 2": Case({"dp_replicate": 2, "dp_shard": 1, "tp": 2, "ep": 2}),
    "one expert a rank, its second dim sharded": Case({"dp_shard": 4, "ep": 2}, model={"count": 2}),
    "a unit of the plan": Case({"dp_shard": 4, "ep": 2}, section={"units": ["layers.*", "layers.*.experts"]}),
    "gathered ahead, kept": Case(
        {"dp_shard": 4, "ep": 2}, section={"prefetch": {"forward": 1, "backward": 1}, "reshard_after_forward": False}
    ),
    "a frozen stack": Case({"dp_shard": 2, "tp": 2, "ep": 4}, frozen=("layers.0.experts.up",)),
}


def reference(case: Case, shares: int, step: int = 0) -> tuple[nn.Module, float]:
    """The unsharded model with the gradients of the mean loss of all shares."""
    model, total = case.build(), 0.0
    for share in range(shares):
        loss = model(*batch(share, step, case.count)) / shares
        loss.backward()
        total += loss.item()
    return model, total


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.abs().max() > 0, name
        assert relative_error(found[name], value) <= LIMIT, (name, relative_error(found[name], value))


def every_gradient(cases: dict[str, Case]) -> None:
    for name, case in cases.items():
        model, mesh = sharded(case)
        shares = mesh.data_parallel_ranks
        expected, total = reference(case, shares)
        loss = model(*batch(share_of(mesh), 0, case.count))
        loss.backward()
        losses = [torch.zeros(()) for _ in range(dist.get_world_size())]
        dist.all_gather(losses, loss.detach())
        assert abs(torch.stack(losses).mean().item() - total) <= LIMIT * total, name
        equal(gradients(model), gradients(expected))
        for layer in model.layers:
            axes = layer.experts.up.device_mesh.mesh_dim_names
            assert axes[-1] == "ep" and isinstance(layer.experts, FSDPModule) == (case.section is not False), name
        norm = torch_clip_grad_norm_(expected.parameters(), MAX_NORM).item()
        assert norm > 2 * MAX_NORM
        assert abs(get_grad_norm(model).item() - norm) <= 1e-6 * norm, name
        assert abs(clip_grad_norm_(model, MAX_NORM).item() - norm) <= 1e-6 * norm, name
        equal(gradients(model), gradients(expected))


def test_every_gradient_and_the_norm_are_those_of_the_unsharded_model():
    on_ranks(4, every_gradient, CASES)


@pytest.mark.slow
def test_every_gradient_on_other_meshes_and_with_other_sections():
    on_ranks(4, every_gradient, MORE)


EIGHT = {
    "replicas 2, dp 2, tp 2, ep 2": Case({"dp_replicate": 2, "dp_shard": 2, "tp": 2, "ep": 2}),
    "replicas 2, dp 2, tp 2, ep 4": Case({"dp_replicate": 2, "dp_shard": 2, "tp": 2, "ep": 4}),
    "dp 2, tp 4, ep 2": Case({"dp_shard": 2, "tp": 4, "ep": 2}),
    "dp 2, cp 2, tp 2, ep 4": Case({"dp_shard": 2, "cp": 2, "tp": 2, "ep": 4}),
}


@pytest.mark.slow
def test_every_gradient_on_eight_ranks():
    on_ranks(8, every_gradient, EIGHT)


# The optimizer


def train(model: nn.Module, clip: Any, batches: list[list[Any]], **options: Any) -> torch.optim.Optimizer:
    """A step for each list of batches, whose mean loss counts."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, **options)
    for of_step in batches:
        for one in of_step:
            (model(*one) / len(of_step)).backward()
        clip(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def two_steps(case: Case) -> None:
    for options in ({"foreach": True}, {"fused": True}):
        model, mesh = sharded(case)
        train(model, clip_grad_norm_, [[batch(share_of(mesh), step)] for step in range(2)], **options)
        expected, shares = case.build(), range(mesh.data_parallel_ranks)
        train(expected, torch_clip_grad_norm_, [[batch(share, step) for share in shares] for step in range(2)])
        start = dict(case.build().named_parameters())
        for name, p in expected.named_parameters():
            assert (p - start[name]).abs().max() > 1e-3, name
        equal({n: whole(p) for n, p in model.named_parameters()}, dict(expected.named_parameters()))


@pytest.mark.slow
def test_two_steps_of_the_optimizer():
    on_ranks(4, two_steps, CASES["dp 2, tp 2, ep 4"])


def micro(case: Case) -> None:
    model, mesh = sharded(case)
    for step, scale in micro_batches(model, range(2), labels=lambda step: 1, loss="mean"):
        (model(*batch(share_of(mesh), step)) * scale).backward()
    expected = case.build()
    for share in range(mesh.data_parallel_ranks):
        for step in range(2):
            (expected(*batch(share, step)) / 2 / mesh.data_parallel_ranks).backward()
    equal(gradients(model), gradients(expected))


def test_gradients_of_micro_batches_are_reduced_once():
    on_ranks(4, micro, CASES["dp 4, ep 2"])


# Weights


def one_ranks_weights(ep: int) -> None:
    """All weights are those of tp rank 0, also in an ep group that does not have it."""
    case = Case({"dp_shard": 1, "tp": 4, "ep": ep})
    model, mesh = sharded(case, seed=dist.get_rank())
    assert mesh.ep is not None and mesh.ep.size() == ep
    for name, p in case.build(0).named_parameters():
        assert torch.equal(whole(model.get_parameter(name)), p), name


@pytest.mark.parametrize("ep", [2, 4])
def test_the_weights_of_the_source_rank_count(ep: int):
    on_ranks(4, one_ranks_weights, ep)


def a_mesh_without_tp() -> None:
    case = Case({})
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    model, read = sharded(case, mesh=mesh, ep=2)
    expected, _ = reference(case, 4)
    model(*batch(share_of(read))).backward()
    equal(gradients(model), gradients(expected))
    assert model.layers[0].experts.up.device_mesh.mesh_dim_names == ("ep_shard", "ep")
    assert model.layers[0].up.weight.device_mesh.mesh_dim_names == ("fsdp",)


def test_a_mesh_without_a_tp_axis():
    on_ranks(4, a_mesh_without_tp)


def given_states() -> None:
    """load_state_dict takes whole tensors, and DTensors of another mesh."""
    other, _ = sharded(CASES["dp 2, tp 2, ep 4"], seed=1)
    expected = dict(CASES["dp 4, ep 2"].build(1).named_parameters())
    for state in (expected, other.state_dict()):
        model, _ = sharded(CASES["dp 4, ep 2"])
        model.load_state_dict(state)
        for name, p in model.named_parameters():
            assert torch.equal(whole(p), expected[name]), name


def test_whole_weights_and_those_of_another_mesh_are_loaded():
    on_ranks(4, given_states)


def weights_saved_and_loaded(folder: str, cases: list[Case]) -> None:
    first, *others = cases
    save_checkpoint(sharded(first, seed=1)[0], folder)
    for case in others:
        model, _ = sharded(case)
        load_checkpoint(model, folder)
        for name, p in first.build(1).named_parameters():
            assert torch.equal(whole(model.get_parameter(name)), p), (case, name)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 8])
def test_weights_are_saved_with_one_ep_and_loaded_with_another(tmp_path, count: int):
    sizes = [{"dp_shard": 4, "ep": 2}, {"dp_shard": 2, "tp": 2, "ep": 2}, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}]
    sizes += [{"dp_shard": 4, "ep": 4}, {"dp_shard": 2, "tp": 2, "ep": 4}] if count == 8 else []
    on_ranks(4, weights_saved_and_loaded, str(tmp_path), [Case(one, model={"count": count}) for one in sizes])


def of_two_dtypes(case: Case) -> None:
    model, mesh = sharded(case)
    seen: list[torch.dtype] = []
    for layer in model.layers:
        layer.experts.register_forward_pre_hook(lambda module, args: seen.extend((args[0].dtype, module.up.dtype)))
        layer.experts.register_forward_hook(lambda module, args, y: seen.append(y.dtype))
    model(*batch(share_of(mesh))).backward()
    assert seen == [torch.bfloat16] * 6
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_experts_compute_in_the_dtype_of_mixed_precision():
    on_ranks(
        4,
        of_two_dtypes,
        Case({"dp_shard": 4, "ep": 2}, {"mixed_precision": {"param": "bfloat16", "reduce": "float32"}}),
    )


# Checkpoints


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    found = {f"model {name}": whole(value) for name, value in of_model.items()}
    for name, state in of_optimizer["state"].items():
        found |= {f"{name} {key}": whole(value) for key, value in state.items()}
    return found


def saved_and_loaded(folder: str, cases: dict[str, Case]) -> None:
    first = cases["saved"]
    model, mesh = sharded(first)
    optimizer = train(model, clip_grad_norm_, [[batch(share_of(mesh), step, first.count)] for step in range(2)])
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    expected = states(model, optimizer)
    assert sum("exp_avg_sq" in name for name in expected) == len(list(model.parameters()))
    whole_model = first.build(1)
    others = {name: sharded(case, seed=1)[0] for name, case in cases.items()}
    for name, other in {**others, "the whole model": whole_model}.items():
        its = torch.optim.AdamW(other.parameters(), **ADAMW)
        of_model, of_optimizer = get_state_dict(other, its)
        state = {"model": of_model, "optimizer": of_optimizer}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(other, its, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        found = states(other, its)
        assert found.keys() == expected.keys(), name
        for key, value in expected.items():
            assert torch.equal(found[key], value), (name, key)


def test_a_checkpoint_is_read_with_another_ep(tmp_path):
    one = {"layers": 1}
    cases = {"saved": Case({"dp_shard": 4, "ep": 2}, model=one), "ep 4": Case({"dp_shard": 4, "ep": 4}, model=one)}
    on_ranks(4, saved_and_loaded, str(tmp_path), cases)


@pytest.mark.slow
def test_a_checkpoint_is_read_on_other_meshes(tmp_path):
    names = {
        "saved": "dp 2, tp 2, ep 4",
        "tp 2": "dp 2, tp 2, ep 2",
        "tp 4": "tp 4, ep 2",
        "replicas": "replicas 2, dp 2, ep 2",
    }
    on_ranks(4, saved_and_loaded, str(tmp_path), {key: (CASES | MORE)[name] for key, name in names.items()})


@pytest.mark.slow
def test_a_checkpoint_of_stacks_that_are_sharded_along_two_dims(tmp_path):
    two = {"count": 2}
    cases = {
        "saved": Case({"dp_shard": 4, "ep": 2}, model=two),
        "both": Case({"dp_shard": 2, "tp": 2, "ep": 2}, model=two),
    }
    on_ranks(4, saved_and_loaded, str(tmp_path), cases)
