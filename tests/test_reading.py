"""Parameters are read by one autograd node a block, and their gradients are the parameters' own placements."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardplan.runtime.parallel import reading
from tests.proofs import fake_mesh, planned, reduced_model


@pytest.fixture(scope="module", autouse=True)
def mesh():
    with fake_mesh(2) as mesh:
        yield mesh


def model_of(mesh, **options) -> nn.Module:
    return planned(reduced_model("qwen3", 2).build(), mesh, "qwen3", **options)


def reads(monkeypatch, model: nn.Module) -> list[int]:
    """How many parameters each node of a forward reads."""
    found, real = [], reading._Read.forward

    def forward(ctx, how, *parameters):
        found.append(len(parameters))
        return real(ctx, how, *parameters)

    monkeypatch.setattr(reading._Read, "forward", staticmethod(forward))
    model(**reduced_model("qwen3", 2).inputs()).loss.backward()
    return found


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
def test_a_block_is_one_node(sp, mesh, monkeypatch):
    model = model_of(mesh, sequence_parallel=sp)
    layer = len(list(model.model.layers[0].parameters()))
    assert sorted(reads(monkeypatch, model)) == [1, 1, 1, layer, layer]  # table, norm and head are outside of blocks


def test_a_block_with_units_of_its_own_reads_what_is_left(mesh, monkeypatch):
    model = model_of(mesh, data_parallel={"units": ["model.layers.*", "model.layers.*.mlp"]})
    layer = len(list(model.model.layers[0].parameters()))
    assert sorted(reads(monkeypatch, model)) == [1, 1, 1, 3, 3, layer - 3, layer - 3]


def test_gradients_have_the_placements_of_their_parameters(mesh):
    model = model_of(mesh, sequence_parallel=True)
    model(**reduced_model("qwen3", 2).inputs()).loss.backward()
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert isinstance(gradient, DTensor) and gradient.placements == parameter.placements, name
        assert gradient.shape == parameter.shape and gradient.stride() == parameter.stride(), name


def test_frozen_parameters_get_no_gradient_and_stay_out_of_the_node(mesh, monkeypatch):
    model = reduced_model("qwen3", 2).build()
    model.model.layers[0].mlp.requires_grad_(False)
    planned(model, mesh, "qwen3")
    layer = len(list(model.model.layers[0].parameters()))
    assert sorted(reads(monkeypatch, model)) == [1, 1, 1, layer - 3, layer]
    assert all(p.grad is None for p in model.model.layers[0].mlp.parameters())


def test_a_module_called_outside_of_its_block_reads_its_own(mesh, monkeypatch):
    model = model_of(mesh)
    mlp, found = model.model.layers[0].mlp, []
    monkeypatch.setattr(reading._Read, "apply", counting(found, reading._Read.apply))
    x = torch.ones(1, 4, model.config.hidden_size)
    mlp(x).sum().backward()
    assert found == [1, 1, 1] and all(p.grad is not None for p in mlp.parameters())


def counting(found: list[int], real):
    def apply(how, *parameters):
        found.append(len(parameters))
        return real(how, *parameters)

    return apply


def test_second_derivatives_are_refused(mesh):
    model = model_of(mesh)
    loss = model(**reduced_model("qwen3", 2).inputs()).loss
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
