"""`init` on the small models of `tests.own`: it splits what a hand splits; those that are drawn go the whole way: a plan by `init`, steps on
real processes, an export."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import on_ranks
from safetensors.torch import load_file
from sampling import SEED, few
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves

import shardplan
from shardplan.proof.compare import TOLERANCE, relative_error
from tests.own.__main__ import found_of, verdict
from tests.own.hand import split
from tests.own.models import MODELS

STEPS = 2
DRAWN = random.Random(SEED).sample(sorted(MODELS), 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", few(MODELS, 3))
def test_init_splits_what_a_hand_splits(name: str) -> None:
    assert verdict(found_of(name, MODELS[name]), MODELS[name]) == ""


def steps_of(name: str, model: torch.nn.Module) -> list[float]:
    """The losses of some steps of SGD; the gradients of the last are kept."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(STEPS):
        optimizer.zero_grad()
        results = [x for x in tree_leaves(model(**MODELS[name].inputs(step))) if isinstance(x, Tensor)]
        loss = torch.stack([x.float().square().mean() for x in results if x.is_floating_point()]).sum()
        loss.backward()
        losses.append(loss.item())
        if step + 1 < STEPS:
            optimizer.step()
    return losses


def trained(name: str, document: dict[str, Any], folder: Path) -> tuple[list[float], dict[str, Tensor | None]]:
    """Losses and whole gradients on a rank of two."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    one = MODELS[name]
    model = shardplan.apply_plan(shardplan.Model(one.made(), inputs=one.inputs), mesh, document)
    losses = steps_of(name, model)
    gradients = {name: gradient for name, _, gradient in shardplan.full_parameters(model, gradients=True)}
    shardplan.save_checkpoint(model, folder)
    return losses, gradients


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if i < 1 else pytest.mark.exhaustive) for i, n in enumerate(DRAWN)]
)
def test_a_drawn_model_goes_the_whole_way(name: str, tmp_path: Path) -> None:
    one = MODELS[name]
    document = shardplan.init_plan(shardplan.Model(one.made(), inputs=one.inputs)).document
    assert split(one.made(), document).stored > 0.5
    whole = one.made()
    wanted = steps_of(name, whole)
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    for losses, found in on_ranks(2, trained, name, document, tmp_path / "exported"):
        assert losses == pytest.approx(wanted, rel=TOLERANCE[torch.float32])
        for parameter, gradient in gradients.items():
            if gradient is not None:
                assert (
                    found[parameter] is not None
                    and relative_error(gradient, found[parameter]) <= TOLERANCE[torch.float32]
                )
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    for parameter, value in whole.named_parameters():
        assert relative_error(value.detach(), exported[parameter]) <= TOLERANCE[torch.float32], parameter
