"""Optimizers of whole matrices: who steps which, what is exchanged, and what comes out."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from optimizer_runs import APART, RATES, SOAP, Run, drawn, muon, newton_schulz, same_given_gradients, soap
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardplan
from shardplan.core.plan import MatrixParts
from shardplan.optimizers import Muon, stepped_by
from shardplan.optimizers import muon as muon_step
from shardplan.optimizers.owned_matrices import assign
from shardplan.proof.threads import on_threads
from tests.collective_counter import CollectiveCounter
from tests.proofs import fake_mesh
from tests.small_models import small_model

MODELS = ["llama", "phi3", "gpt2", "bloom", "qwen3_moe", "mixtral", "gemma3_text", "mamba2"]
MESHES = {
    "dp2": ({"dp_shard": 2}, {}),
    "tp2": ({"tp": 2}, {}),
    "tp2-sp": ({"tp": 2}, {"sequence_parallel": True}),
    "dp2-tp2": ({"dp_shard": 2, "tp": 2}, {"sequence_parallel": True}),
}
FAST = {("phi3", "dp2-tp2"), ("qwen3_moe", "tp2")}


@pytest.fixture(autouse=True)
def one_thread():
    """torch's element-wise kernels round the ends of each thread's share otherwise than the rest of it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def heaviest(work, owners, busy):
    loads = list(busy)
    for one, owner in zip(work, owners, strict=True):
        loads[owner] += one
    return max(loads)


def test_no_rank_has_more_work_than_a_tenth_above_the_best_assignment():
    random = Random(0)
    for _ in range(150):
        ranks = random.choice([2, 3])
        work = [random.choice([3, 4, 5, 7, 9, 10, 14, 20]) for _ in range(random.randint(1, 8))]
        busy = [random.choice([0, 0, 6]) for _ in range(ranks)]
        best = min(heaviest(work, owners, busy) for owners in product(range(ranks), repeat=len(work)))
        assert heaviest(work, assign(work, busy), busy) <= 1.1 * best, (work, busy)


def test_the_longest_alone_is_not_enough():
    assert heaviest([3, 3, 2, 2, 2], assign([3, 3, 2, 2, 2], [0, 0]), [0, 0]) == 6


@pytest.mark.parametrize(
    "model, mesh",
    [
        pytest.param(model, mesh, marks=[] if (model, mesh) in FAST else pytest.mark.exhaustive)
        for model in MODELS
        for mesh in MESHES
    ],
)
def test_the_same_gradients_have_the_same_update_to_the_bit(model, mesh):
    same_given_gradients(Run(model, *MESHES[mesh]))


@pytest.mark.parametrize(
    "model, mesh",
    [
        pytest.param(model, mesh, marks=[] if (model, mesh) == ("phi3", "tp2-sp") else pytest.mark.exhaustive)
        for model in APART
        for mesh in MESHES
    ],
)
def test_matrices_that_a_plan_takes_apart_are_stepped_one_by_one(model, mesh):
    """Parts of packed rows, whose ranks have a share of each, and heads, also columns: the rate follows from the shape of each, too."""
    sizes, options = MESHES[mesh]
    same_given_gradients(Run(model, sizes, {**options, "separate_matrices": APART[model][0]}))


def stepped(optimizer) -> CollectiveCounter:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    with CollectiveCounter() as counter:
        optimizer.step()
    return counter


@pytest.mark.parametrize("shape, names", [((4,), ("tp",)), ((2, 2), ("dp_shard", "tp"))], ids=["tp", "dp x tp"])
def test_a_bucket_takes_two_collectives(shape, names, compiled_once):
    with fake_mesh(*shape, names=names) as mesh:
        model = shardplan.apply_plan(small_model("llama"), mesh, "auto", src_data_rank=None, prove=False)
        optimizer = muon(model)
        counter = stepped(optimizer)
        assert dict(counter.counts) == {"all_to_all": 2, "all_reduce": 1}
        agreed, sent, returned = (call.elements for call in counter.calls)
        assert agreed == 28  # two numbers for each matrix
        assert stepped(muon(model, bucket_size=1)).counts["all_to_all"] == 8  # 14 matrices in turns of 4 ranks
        assert max(sent, returned) <= 1.1 * max(
            sum(p.to_local().numel() for p in optimizer.param_groups[0]["params"]),
            sum(one.numel for one in optimizer._pieces if one.owner == 0),
        )


def test_the_work_of_ranks_is_balanced(compiled_once):
    with fake_mesh(2, 2, names=("dp_shard", "tp")) as mesh:
        model = shardplan.apply_plan(small_model("llama"), mesh, "auto", src_data_rank=None, prove=False)
        pieces = muon(model)._pieces
    work, owners = [one.work for one in pieces], [one.owner for one in pieces]
    assert heaviest(work, owners, [0] * 4) <= 1.1 * max(sum(work) / 4, *work)


class Own(nn.Module):
    """Rows that three ranks do not divide, one row alone, columns, a stack, and a plain parameter."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {"rows": (7, 5), "one": (1, 6), "columns": (5, 7), "stack": (4, 5, 3), "plain": (3, 4)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)))


def uneven(options: dict[str, Any], rank: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    options = {"matrices": ["*"], **options}
    plain, model = Own(), Own()
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    model.columns = nn.Parameter(distribute_tensor(model.columns.data, mesh, [Shard(1)], src_data_rank=None))
    for name in ("rows", "one", "stack"):
        value = distribute_tensor(getattr(model, name).data, mesh, [Shard(0)], src_data_rank=None)
        setattr(model, name, nn.Parameter(value))
    optimizers = [muon(one, **options) for one in (plain, model)]
    for step in range(4):
        for name, parameter in plain.named_parameters():
            parameter.grad = torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64
            )
            own = getattr(model, name)
            split = hasattr(own, "placements")
            own.grad = (
                distribute_tensor(parameter.grad, mesh, own.placements, src_data_rank=None)
                if split
                else parameter.grad.clone()
            )
        if step == 1:
            plain.rows.grad = model.rows.grad = None  # what has no gradient stays as it is, its momentum too
        if step == 2:  # from here on with another, which has what it had
            other = muon(model, **options)
            other.load_state_dict(optimizers[1].state_dict())
            optimizers[1] = other
        for optimizer in optimizers:
            optimizer.step()
    return {
        name: (p.detach(), q.full_tensor().detach() if hasattr(q, "placements") else q.detach())
        for (name, p), q in zip(
            plain.named_parameters(), (getattr(model, n) for n, _ in plain.named_parameters()), strict=True
        )
    }


# Without the one row: SOAP's basis of what no gradient has shown yet is rounding.
STATE = {**SOAP, "matrices": ["rows", "columns", "stack", "plain"]}
OF_PLAN = {"rows": MatrixParts("parts", 0, (4, 3)), "stack": MatrixParts("heads", 1, (2, 3))}


@pytest.mark.parametrize("options", [{"whole_matrix": newton_schulz}, STATE], ids=["step", "state"])
def test_uneven_shards(options, monkeypatch):
    if "stateful" in options:
        monkeypatch.setattr(muon_step, "of_plan", lambda model: (OF_PLAN, {}, 1))
    for found in on_threads(3, partial(uneven, options)):
        for name, (expected, value) in found.items():
            assert torch.allclose(value, expected, rtol=1e-11, atol=1e-13), name


def test_a_step_with_a_state_is_that_of_the_function():
    """SOAP as it was published, without shards: a dict for each matrix, and the rate as it is."""
    model, states = Own(), defaultdict(dict)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = Muon(model, matrices=["*"], lr=0.1, weight_decay=0.0, **SOAP)
    for step in range(4):
        for name, parameter in model.named_parameters():
            parameter.grad = drawn(name, parameter, step)
            for i in range(parameter.shape[0] if parameter.ndim == 3 else 1):
                one = (
                    (expected[name], parameter.grad) if parameter.ndim == 2 else (expected[name][i], parameter.grad[i])
                )
                one[0].sub_(soap(one[1].clone(), states[name, i]), alpha=0.1)
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter, expected[name], rtol=1e-12, atol=0), name


class Packaged(torch.optim.Optimizer):
    """An optimizer as packages write them: its number of steps is in the group, its state has lists, numbers and None, and its first step only
    begins it.

    Args:
        decay: of the parameter, which `whole_matrix` does not know.
        keeps: something else that is kept.
    """

    def __init__(self, parameters, lr=1.0, decay=0.0, keeps=None):
        super().__init__(parameters, {"lr": lr, "decay": decay, "keeps": keeps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {
                        "grams": [torch.zeros_like(p @ p.T), torch.zeros_like(p.T @ p)],
                        "none": None,
                        "seen": 0.0,
                        "first": True,
                    }
                    state["other"] = group["keeps"]
                state["grams"][0] += p.grad @ p.grad.T
                state["grams"][1] += p.grad.T @ p.grad
                state["seen"] += 0.5
                if state["first"]:
                    state["first"] = False
                    continue
                assert state["none"] is None and type(group["step"]) is int and type(state["first"]) is bool
                update = state["grams"][0] @ p.grad @ state["grams"][1] / (group["step"] * state["seen"])
                p.mul_(1 - group["decay"]).sub_(update, alpha=group["lr"])


def test_a_packages_optimizer_steps_whole_matrices():
    """On shards as on the unsharded model, and there as by itself."""
    hooked = {**SOAP, "whole_matrix": stepped_by(Packaged), "matrices": STATE["matrices"]}
    for found in on_threads(3, partial(uneven, hooked)):
        for name, (expected, value) in found.items():
            assert torch.allclose(value, expected, rtol=1e-11, atol=1e-13), name
    model, alone = Own(), Own()
    stack = [nn.Parameter(one.clone()) for one in alone.stack.detach()]
    optimizer = Muon(model, lr=0.1, weight_decay=0.0, **hooked)
    plain = Packaged([alone.rows, alone.columns, alone.plain, *stack], lr=0.1)
    for step in range(4):
        for name, parameter in model.named_parameters():
            parameter.grad = drawn(name, parameter, step)
            getattr(alone, name).grad = parameter.grad.clone()
        for one, gradient in zip(stack, alone.stack.grad, strict=True):
            one.grad = gradient.clone()
        optimizer.step()
        plain.step()
    for name in ("rows", "columns", "plain"):
        assert torch.allclose(getattr(model, name), getattr(alone, name), rtol=1e-12), name
    assert torch.allclose(model.stack, torch.stack(stack), rtol=1e-12)


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"decay": 0.1}, ValueError, "the update of Packaged depends on the values of the matrix"),
        ({"keeps": "text"}, TypeError, "keeps state/other, a str: only tensors, numbers"),
        ({"keeps": {"a/b": 1}}, TypeError, "keeps 'a/b', whose name has / or :"),
    ],
)
def test_what_cannot_step_whole_matrices_is_found_when_it_is_made(options, error, words):
    with pytest.raises(error, match=words):
        stepped_by(lambda matrices: Packaged(matrices, **options))


def test_a_packages_optimizer_is_tried_where_there_is_a_device(monkeypatch):
    """A build for CUDA names it on a machine without a GPU too, unless it is asked what is there."""
    named = torch.device("cuda")
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: None if check_available else named
    )
    stepped_by(Packaged)


def test_a_state_of_other_matrices_is_refused(monkeypatch):
    first = Muon(Tower(), **SOAP)
    for group in first.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    first.step()
    monkeypatch.setattr(muon_step, "of_plan", lambda model: ({"layer.weight": MatrixParts("parts", 0, (4, 2))}, {}, 1))
    with pytest.raises(ValueError, match="layer.weight was saved for 1 matrices in it, and the plan makes 2 of it"):
        Muon(Tower(), **SOAP).load_state_dict(first.state_dict())


def test_a_state_is_of_tensors():
    model = Tower()
    optimizer = Muon(model, whole_matrix=lambda matrix, state: state.update(step=1) or matrix, stateful=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(TypeError, match="whole_matrix keeps 'step' of experts, which is 1: keep tensors"):
        optimizer.state_dict()


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.layer = nn.Linear(4, 6)
        self.convolution = nn.Conv1d(6, 6, 3)
        self.position = nn.Parameter(torch.zeros(1, 3, 4))
        self.experts = nn.Parameter(torch.ones(2, 4, 6))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def test_which_parameters_are_matrices():
    optimizer = Muon(Tower(), lr=0.1)
    assert [one.name for one in optimizer.stacks] == ["experts", "layer.weight"]
    assert len(optimizer.param_groups) == 2 and len(optimizer.param_groups[1]["params"]) == 5
    assert optimizer.param_groups[0]["momentum"] == 0.95 and optimizer.param_groups[1]["betas"] == (0.9, 0.999)
    tied = small_model("llama", tied=True)
    assert len(Muon(tied).param_groups[0]["params"]) == len(Muon(small_model("llama")).param_groups[0]["params"]) == 14
    assert [one.name for one in Muon(Tower(), matrices=["table.*"]).stacks] == ["table.weight"]


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"betas": (0.9, 0.9)}, TypeError, "Muon has no option betas: it has those of torch.optim.Muon, lr, "),
        ({"lr": -1.0}, ValueError, "Learning rate should be >= 0"),
        (
            {"matrices": ["layers.*"]},
            ValueError,
            r"matrices: layers.\* fits no parameter that is trained; one is position",
        ),
        ({"matrices": ["layer.*"]}, ValueError, "layer.bias has 1 dims: a matrix has 2"),
        ({"stateful": True}, ValueError, "stateful is of whole_matrix"),
    ],
)
def test_wrong_calls(options, error, words):
    with pytest.raises(error, match=words):
        Muon(Tower(), **options)


def test_shards_that_are_cut_otherwise_are_refused():
    with fake_mesh(2) as mesh:
        model = nn.Linear(4, 8, bias=False)
        own = DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)], run_check=False, shape=(8, 4), stride=(4, 1))
        model.weight = nn.Parameter(own)
        with pytest.raises(ValueError, match=r"weight: this rank has \(1, 3, 4\) of \(1, 8, 4\)"):
            Muon(model)


def test_new_parameters_need_a_new_optimizer():
    with pytest.raises(ValueError, match="create it again"):
        Muon(Tower()).add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_schedules_and_states_are_those_of_one_optimizer():
    model = Tower()
    optimizer = muon(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [RATES["lr"] / 2, 1e-3 / 2]
    other = muon(Tower())
    other.load_state_dict(optimizer.state_dict())
    assert [group["lr"] for group in other._rest.param_groups] == [1e-3 / 2]
    assert other._rest.state is other.state and len(other.state) == len(optimizer.state) == 7
