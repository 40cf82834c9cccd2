"""Optimizers that were made before a plan was applied, and those that cannot step shards: their first step says so, and changes nothing."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import _global_optimizer_pre_hooks
from transformers.optimization import Adafactor

from shardplan import apply_plan
from shardplan.optimizers import Muon
from tests.proofs import fake_mesh, reduced_model


@pytest.fixture(scope="module", autouse=True)
def mesh(compiled_once):
    with fake_mesh(4) as mesh:
        yield mesh


@pytest.fixture(autouse=True)
def no_hooks_of_other_tests():
    _global_optimizer_pre_hooks.clear()
    yield
    _global_optimizer_pre_hooks.clear()


def planned(model: nn.Module, mesh) -> nn.Module:
    return apply_plan(model, mesh, "llama", src_data_rank=None, prove=False)


def with_gradients(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=["loop", "foreach", "fused"])
def test_the_first_step_is_refused_before_anything_changes(mesh, kind, options):
    model = with_gradients(reduced_model("llama", 4).build())
    early = kind(model.parameters(), lr=0.1, **options)
    planned(model, mesh)
    state = copy.deepcopy(early.state_dict())
    for _ in range(2):
        with pytest.raises(ValueError, match=r"created before apply_plan.*Create the optimizer after apply_plan"):
            early.step()
    assert early.state_dict()["state"] == state["state"] == {}
    with_gradients(model)
    kind(model.parameters(), lr=0.1).step()
    assert not _global_optimizer_pre_hooks, "the hook stays after a good step"


def test_the_parameters_are_named(mesh):
    model = reduced_model("llama", 4).build()
    early = torch.optim.SGD([model.lm_head.weight, nn.Parameter(torch.ones(1))], lr=0.1)
    planned(model, mesh)
    with pytest.raises(ValueError, match=r"replaced 1 of the 2 parameters that it holds \(lm_head.weight\)"):
        early.step()


def test_optimizers_of_other_models_pass_and_leave_the_hook(mesh):
    model = reduced_model("llama", 4).build()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    planned(model, mesh)
    torch.optim.SGD(with_gradients(nn.Linear(2, 2)).parameters(), lr=0.1).step()
    with pytest.raises(ValueError, match="created before apply_plan"):
        early.step()


def test_accelerates_wrapper(mesh):
    accelerator = Accelerator(cpu=True)
    model = reduced_model("llama", 4).build()
    early = accelerator.prepare_optimizer(torch.optim.AdamW(model.parameters()))
    planned(model, mesh)
    with pytest.raises(ValueError, match="created before apply_plan"):
        early.step()
    accelerator.prepare_optimizer(torch.optim.AdamW(with_gradients(model).parameters())).step()
    assert not _global_optimizer_pre_hooks


def test_a_compiled_step(mesh):
    model = reduced_model("llama", 4).build()
    early = torch.optim.SGD(with_gradients(model).parameters(), lr=0.1)
    planned(model, mesh)
    with pytest.raises(ValueError, match="created before apply_plan"):
        torch.compile(early.step, backend="eager")()


def test_the_hook_goes_with_the_model(mesh):
    planned(reduced_model("llama", 4).build(), mesh)  # `compiled_once` keeps the first one
    _global_optimizer_pre_hooks.clear()
    planned(model := reduced_model("llama", 4).build(), mesh)
    assert len(_global_optimizer_pre_hooks) == 1
    other = torch.optim.SGD(with_gradients(nn.Linear(2, 2)).parameters(), lr=0.1)
    other.step()
    assert len(_global_optimizer_pre_hooks) == 1
    del model
    gc.collect()
    other.step()
    assert not _global_optimizer_pre_hooks


def test_the_hook_stays_until_all_parameters_have_an_optimizer(mesh):
    planned(model := with_gradients(reduced_model("llama", 4).build()), mesh)
    with_gradients(model)
    head = model.lm_head.weight
    torch.optim.SGD([p for p in model.parameters() if p is not head], lr=0.1).step()
    with pytest.raises(ValueError, match="Adafactor cannot step"):
        torch.optim.Adafactor([head]).step()
    torch.optim.SGD([head], lr=0.1).step()
    assert not _global_optimizer_pre_hooks


def test_nothing_is_kept_alive(mesh):
    gone = weakref.ref((model := reduced_model("llama", 4).build()).lm_head.weight)
    planned(model, mesh)
    gc.collect()
    assert gone() is None


def local_tensors(model, optimizer):
    states = [value for entries in optimizer.state.values() for value in entries.values()]
    found = [x.detach() for x in (*model.parameters(), *states)]
    return [x.to_local() if hasattr(x, "placements") else x for x in found]


UNFIT = {
    "torch": (lambda p: torch.optim.Adafactor(p), "Adafactor cannot step .* takes means of rows and columns in place"),
    "transformers": (lambda p: Adafactor(p), r"Adafactor cannot step .*Write torch.optim.AdamW\(...\)"),
    # Since torch 2.15 one matrix after the other can be stepped.
    "Rprop": (lambda p: torch.optim.Rprop(p, foreach=True), "Rprop cannot step .* at places that a mask chooses"),
    "SGD": (
        lambda p: torch.optim.SGD(p, fused=True),
        r"SGD\(..., fused=True\) cannot .*Write SGD\(..., foreach=True\)",
    ),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, fused=True), r"Write Adagrad\(..., foreach=True\)"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_what_cannot_step_shards_is_refused_before_anything_changes(mesh, kind):
    make, words = UNFIT[kind]
    model = reduced_model("llama", 4).build()
    planned(model, mesh)
    with_gradients(model)
    optimizer = make(list(model.parameters()))
    before = copy.deepcopy(local_tensors(model, optimizer))
    for _ in range(2):
        with pytest.raises(ValueError, match=words):
            optimizer.step()
    with pytest.raises(ValueError, match=words):
        Muon(model, rest=lambda groups: make(groups[0]["params"]))
    assert all(torch.equal(*pair) for pair in zip(local_tensors(model, optimizer), before, strict=True))
    # Without the refusal: a torch that has learned it is to be told here.
    _global_optimizer_pre_hooks.clear()
    with pytest.raises((RuntimeError, NotImplementedError)):
        optimizer.step()


def test_what_is_whole_is_stepped(mesh):
    for make, _ in UNFIT.values():
        make(list(with_gradients(nn.Linear(2, 2)).parameters())).step()


def test_nothing_is_registered_where_no_parameter_is_replaced(mesh):
    alone = DeviceMesh("cpu", [0], mesh_dim_names=("tp",))
    apply_plan(reduced_model("llama", 4).build(), alone, "llama", data_parallel=False)
    assert not _global_optimizer_pre_hooks
