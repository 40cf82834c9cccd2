"""Training steps of a pipeline in real processes, and of the unsharded model next to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from processes import on_ranks
from small_models import LENGTH, VOCABULARY, share_of, small_model, whole
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from training_runs import ADAMW, MAX_NORM

import shardplan
from shardplan.core.mesh import MeshSizes
from shardplan.proof.compare import TOLERANCE, relative_error
from shardplan.proof.exact import in_precision_of

STEPS = 3
# What the tests need of the section, by kind of model.
LLAMA = {"layers": "model.layers.*"}
GPT2 = {"layers": "transformer.h.*"}


@dataclass(frozen=True)
class Recipe:
    """One run.

    Args:
        sizes: of the mesh, as `build_mesh` gets them.
        options: of `apply_plan`.
        settings: of the model's configuration.
        change: done to the unsharded model first, in both runs.
        auxiliary: (output of the model) -> what its loss has besides the mean over tokens.
        rows: of the batch, on each data-parallel rank.
        names: name in the pipeline -> name in the unsharded model.
    """

    model: str
    sizes: Mapping[str, int]
    schedule: str = "1f1b"
    sequence_parallel: bool = False
    tied: bool = False
    section: Mapping[str, Any] = field(default_factory=lambda: LLAMA)
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[nn.Module], nn.Module | None] | None = None
    auxiliary: Callable[[Any], Tensor] | None = None
    micro_batches: int = 4
    rows: int = 8
    max_norm: float = MAX_NORM
    lr: float = ADAMW["lr"]
    lengths: tuple[int, ...] = (LENGTH,) * STEPS
    plan: Any = "auto"
    dtype: torch.dtype = torch.float64

    @property
    def replicas(self) -> int:
        return self.sizes.get("dp_shard", 1) * self.sizes.get("dp_replicate", 1)

    @property
    def ranks(self) -> int:
        return MeshSizes(**self.sizes).world_size

    def build(self) -> nn.Module:
        model = small_model(self.model, tied=self.tied, dtype=self.dtype, **{"num_hidden_layers": 4, **self.settings})
        return (self.change(model) if self.change is not None else None) or model


def batch(recipe: Recipe, step: int, replica: int) -> dict[str, Tensor]:
    """A batch whose micro-batches have other numbers of tokens, with padding in one row."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    shape = (recipe.rows, recipe.lengths[step])
    ids = torch.randint(10, VOCABULARY, shape, generator=generator)
    labels = ids.masked_fill(torch.rand(shape, generator=generator) < 0.2 * (1 + replica), -100)
    mask = torch.ones(shape, dtype=torch.long)
    mask[1, -5:], labels[1, -5:] = 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@dataclass
class Step:
    """What one step gave: the loss, the norm before clipping, gradients before it and parameters after it."""

    loss: float
    norm: float
    gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor]


def pipeline_of(recipe: Recipe) -> shardplan.Pipeline:
    """The pipeline of a recipe, on the ranks of this process group."""
    mesh = shardplan.build_mesh(**recipe.sizes)
    options = {"prove": False, "sequence_parallel": recipe.sequence_parallel, **recipe.options}
    own = {name: options.pop(name) for name in ("stages_per_rank", "loss_fn") if name in options}
    return shardplan.apply_plan(
        recipe.build(),
        mesh,
        recipe.plan,
        pipeline=shardplan.PipelineOptions(recipe.schedule, recipe.micro_batches, **own),
        pipeline_parallel=dict(recipe.section),
        **options,
    )


def replica_of(pipeline: shardplan.Pipeline) -> int:
    """Which data-parallel share is this rank's."""
    return share_of(pipeline.layout.mesh.mesh)[0]


def staged(recipe: Recipe) -> list[Step]:
    pipeline = pipeline_of(recipe)
    return steps_of(recipe, pipeline, optimizer_of(recipe, pipeline), range(STEPS))


def optimizer_of(recipe: Recipe, pipeline: shardplan.Pipeline) -> torch.optim.Optimizer | None:
    """None for a rank whose stages are frozen."""
    trained = [p for p in pipeline.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, **{**ADAMW, "lr": recipe.lr}) if trained else None


def steps_of(
    recipe: Recipe, pipeline: shardplan.Pipeline, optimizer: torch.optim.Optimizer | None, which: range
) -> list[Step]:
    replica, steps = replica_of(pipeline), []
    for step in which:
        given = batch(recipe, step, replica)
        with in_precision_of(pipeline):
            loss = pipeline.step(**given)
        found = shardplan.full_parameters(pipeline, gradients=True)
        gradients = {name: None if gradient is None else gradient.clone() for name, _, gradient in found}
        norm = shardplan.clip_grad_norm_(pipeline, recipe.max_norm)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        steps.append(Step(loss.item(), norm.item(), gradients, parameters_of(pipeline)))
    return steps


def parameters_of(pipeline: shardplan.Pipeline) -> dict[str, Tensor]:
    states = [pipeline.module_of(part).state_dict() for part in pipeline.parts]
    return {name: whole(value).detach().clone() for state in states for name, value in state.items()}


def unsharded(recipe: Recipe) -> list[Step]:
    """All shares of the batch in one model."""
    model = recipe.build()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **{**ADAMW, "lr": recipe.lr})
    steps = []
    for step in range(STEPS):
        shares = [batch(recipe, step, replica) for replica in range(recipe.replicas)]
        with in_precision_of(model):
            if recipe.auxiliary is None:
                together = {name: torch.cat([share[name] for share in shares]) for name in shares[0]}
                loss = model(**together, use_cache=False).loss
            else:
                loss = mixed(recipe, model, shares, recipe.auxiliary)
            loss.backward()
        gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        norm = clip_grad_norm_(model.parameters(), recipe.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(Step(loss.item(), norm.item(), gradients, {n: v.clone() for n, v in model.state_dict().items()}))
    return steps


def mixed(
    recipe: Recipe, model: nn.Module, shares: list[dict[str, Tensor]], auxiliary: Callable[[Any], Tensor]
) -> Tensor:
    """The sum over all tokens divided by their number, and the mean of the rest over micro-batches."""
    tokens = sum(int((share["labels"][:, 1:] != -100).sum()) for share in shares)
    total = torch.zeros((), dtype=recipe.dtype)
    for share in shares:
        for rows in torch.arange(recipe.rows).chunk(recipe.micro_batches):
            labels = share["labels"][rows]
            output = model(
                input_ids=share["input_ids"][rows], attention_mask=share["attention_mask"][rows], use_cache=False
            )
            flat = nn.functional.cross_entropy(
                output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
            )
            total = total + flat / tokens + auxiliary(output) / (recipe.micro_batches * len(shares))
    return total


def compare(recipe: Recipe, seconds: float = 300.0) -> None:
    """Run both; everything must be equal on every rank, and every parameter is on some rank."""
    runs = on_ranks(recipe.ranks, staged, recipe, seconds=seconds)
    expected = unsharded(recipe)
    assert min(step.norm for step in expected) > 1.2 * recipe.max_norm, "clipping must bite"
    check(recipe, runs, expected)


def check(recipe: Recipe, runs: list[list[Step]], expected: list[Step]) -> None:
    limit = TOLERANCE[recipe.dtype]
    for step, right in enumerate(expected):
        seen: set[str] = set()
        for rank, run in enumerate(runs):
            got = run[step]
            assert got.loss == pytest.approx(right.loss, rel=1e-6), ("loss", step, rank, got.loss, right.loss)
            assert got.norm == pytest.approx(right.norm, rel=limit), ("norm", step, rank, got.norm, right.norm)
            assert got.parameters.keys() <= right.parameters.keys()
            assert list(got.gradients) == list(right.gradients)
            seen |= got.parameters.keys()
            for name, value in got.gradients.items():
                wanted = right.gradients[name]
                assert (value is None) == (wanted is None), (step, rank, name)
                if value is not None and wanted is not None:
                    assert relative_error(value, wanted) <= limit, (step, rank, name, relative_error(value, wanted))
            for name, value in got.parameters.items():
                assert relative_error(value, right.parameters[name]) <= limit, (step, rank, name)
        assert seen == right.parameters.keys(), right.parameters.keys() - seen
