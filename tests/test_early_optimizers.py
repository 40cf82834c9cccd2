"""Optimizers that were made before a plan was applied: their first step says so, and changes nothing."""

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

from shardplan import apply_plan
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


def test_the_hook_goes_once_nobody_holds_what_was_replaced(mesh):
    model = reduced_model("llama", 4).build()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    planned(model, mesh)
    assert len(_global_optimizer_pre_hooks) == 1
    del early
    gc.collect()
    torch.optim.SGD(with_gradients(nn.Linear(2, 2)).parameters(), lr=0.1).step()
    assert not _global_optimizer_pre_hooks


def test_without_such_an_optimizer_nothing_is_registered_or_kept_alive(mesh):
    gone = weakref.ref((model := reduced_model("llama", 4).build()).lm_head.weight)
    planned(model, mesh)
    gc.collect()
    assert gone() is None and not _global_optimizer_pre_hooks


def test_nothing_is_registered_where_no_parameter_is_replaced(mesh):
    alone = DeviceMesh("cpu", [0], mesh_dim_names=("tp",))
    apply_plan(reduced_model("llama", 4).build(), alone, "llama", data_parallel=False)
    assert not _global_optimizer_pre_hooks
