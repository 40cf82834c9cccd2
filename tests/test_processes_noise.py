"""A gate that adds noise to whole logits: all tp ranks draw the same numbers, data-parallel ranks their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import on_ranks
from small_models import whole
from torch import Tensor, nn

import shardplan
from shardplan.proof.compare import relative_error
from tests.adversaries.mixtures import CASES, Router, mixture
from tests.adversaries.parts import features

PLAN = next(case for case in CASES if case.name == "experts_router_seeded/ep_tp").plan


def kept(model: nn.Module, states: list[Tensor]) -> None:
    """Keep the states from which routers draw, in order."""

    def note(module: nn.Module, args: Any) -> None:
        states.append(torch.get_rng_state())

    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_pre_hook(note)


def set_before(model: nn.Module, states: list[Tensor]) -> None:
    """Have routers draw from these states."""
    left = iter(states)
    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_pre_hook(lambda module, args: torch.set_rng_state(next(left)))


def noisy() -> nn.Module:
    torch.manual_seed(0)
    return mixture(router="noisy").train()


def drawn(mesh_sizes: dict[str, int]) -> tuple[list[Tensor], dict[str, float]]:
    """From which states the routers of this rank drew, and how far the rank is from the unsharded model that draws the same."""
    model, reference = noisy(), noisy()
    states: list[Tensor] = []
    kept(model, states)
    model = shardplan.apply_plan(shardplan.Model(model, inputs=features), shardplan.build_mesh(**mesh_sizes), PLAN)
    states.clear()  # of the proof
    torch.manual_seed(100 + torch.distributed.get_rank())  # of its own on every rank
    batch = features(1)
    y = model(**batch)
    y.square().mean().backward()
    set_before(reference, states)
    expected = reference(**batch)
    expected.square().mean().backward()
    errors = {"output": relative_error(whole(y.detach()), expected.detach())}
    gradients = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        errors[name] = relative_error(whole(parameter.grad), gradients[name].grad)
    return states, errors


def test_tp_ranks_draw_the_same_as_the_unsharded_model() -> None:
    (first, errors), (second, others) = on_ranks(2, drawn, {"tp": 2, "ep": 2})
    assert first and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert max(errors.values()) < 1e-5 and max(others.values()) < 1e-5, (errors, others)


@pytest.mark.slow
def test_data_parallel_ranks_draw_their_own() -> None:
    states = [found[0] for found in on_ranks(4, drawn, {"dp_shard": 2, "tp": 2, "ep": 2})]
    assert all(torch.equal(a, b) for a, b in zip(states[0], states[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(states[0], states[2], strict=True))
