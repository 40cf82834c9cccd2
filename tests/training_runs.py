"""A few optimiser steps in real processes, with clipping and gradient accumulation, and the unsharded run next to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any

import pytest
import torch
from processes import on_ranks
from small_models import batch, share_of, small_model, whole, whole_state
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_

import shardplan
from shardplan.proof.compare import TOLERANCE, relative_error

STEPS, MICRO_BATCHES, MAX_NORM = 3, 2, 0.5
# With an `eps` like the clipped gradients, a step depends on their size; with a tiny one, AdamW would hide a gradient
# that is twice too large, and show rounding of one that is almost zero.
ADAMW = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
TP_NAMES = ("tp", "tensor_parallel", "rows")


@dataclass(frozen=True)
class Recipe:
    """One training run.

    Args:
        sizes: of the mesh, by axis name, in order.
        options: keyword arguments of `apply_plan`.
        change: done to the unsharded model first, in both runs.
        mixture: the loss has a term that is no mean over tokens, so the combined batch's loss is the mean of its
            parts' losses.
        plan: for the sharded run.
        under: a context for it, in which it has what its processes lack.
        settings: of the model's configuration.
        defer: reduce gradients over data-parallel ranks at the last micro-batch only.
    """

    model: str
    sizes: Mapping[str, int]
    sequence_parallel: bool = True
    tied: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[nn.Module], None] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    defer: bool = False
    mixture: bool = False
    plan: Any = "auto"
    under: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def apart(self) -> list[str]:
        """The axes whose ranks get batches of their own."""
        return [axis for axis in self.sizes if axis not in TP_NAMES]

    def build(self) -> nn.Module:
        model = small_model(self.model, tied=self.tied, dtype=torch.float64, **self.settings)
        if self.change is not None:
            self.change(model)
        return model


@dataclass(frozen=True)
class Run:
    """What a run gave: per step the loss, the total norm before clipping, and the whole parameters afterwards."""

    losses: list[float]
    norms: list[float]
    parameters: list[dict[str, Tensor]]
    share: int = 0  # which data-parallel share this rank trained on


def train(recipe: Recipe, model: nn.Module, called: nn.Module, parts_of: Callable[[int, int], list[Tensor]]) -> Run:
    """Some steps of a model, called through a wrapper or itself; `parts_of(step, micro)` gives the micro-batches whose
    mean loss counts."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW)
    run = Run([], [], [])
    for step in range(STEPS):
        total = 0.0
        for micro in range(MICRO_BATCHES):
            if recipe.defer and hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(micro == MICRO_BATCHES - 1)
            parts = parts_of(step, micro)
            for ids in parts:
                loss = called(input_ids=ids, labels=ids, use_cache=False).loss / (MICRO_BATCHES * len(parts))
                loss.backward()
                total += loss.item()
        norm = clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(total)
        run.norms.append(whole(norm).item())
        run.parameters.append(whole_state(model))
    return run


def sharded(recipe: Recipe) -> Run:
    with recipe.under():
        return _sharded(recipe)


def _sharded(recipe: Recipe) -> Run:
    mesh = init_device_mesh("cpu", tuple(recipe.sizes.values()), mesh_dim_names=tuple(recipe.sizes))
    model = recipe.build()
    called = shardplan.apply_plan(
        model, mesh, recipe.plan, sequence_parallel=recipe.sequence_parallel, **recipe.options, prove=False
    )
    share, _ = share_of(mesh, recipe.apart)
    run = train(recipe, model, called, lambda step, micro: [batch(step, micro, share)])
    return Run(run.losses, run.norms, run.parameters, share)


def unsharded(recipe: Recipe, shares: int) -> Run:
    def parts(step: int, micro: int) -> list[Tensor]:
        own = [batch(step, micro, share) for share in range(shares)]
        return own if recipe.mixture else [torch.cat(own)]

    model = recipe.build()
    return train(recipe, model, model, parts)


def compare(recipe: Recipe, seconds: float = 120.0) -> None:
    """Run both; everything must be equal on every rank."""
    ranks, shares = prod(recipe.sizes.values()), prod(recipe.sizes[axis] for axis in recipe.apart)
    runs = on_ranks(ranks, sharded, recipe, seconds=seconds)
    expected = unsharded(recipe, shares)
    assert min(expected.norms) > 1.2 * MAX_NORM, "clipping must bite"
    limit = TOLERANCE[torch.float64]
    copies = ranks // shares
    for step in range(STEPS):
        loss = sum(run.losses[step] for run in runs) / ranks
        assert loss == pytest.approx(expected.losses[step], rel=limit)
        for share in range(shares):
            assert len({run.losses[step] for run in runs if run.share == share}) == 1 <= copies
        for rank, run in enumerate(runs):
            assert run.norms[step] == pytest.approx(expected.norms[step], rel=limit), (step, rank)
            assert run.parameters[step].keys() == expected.parameters[step].keys()
            for name, value in run.parameters[step].items():
                assert relative_error(value, expected.parameters[step][name]) <= limit, (step, rank, name)


TWO_BY_TWO = {"dp_shard": 2, "tp": 2}
HYBRID = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
