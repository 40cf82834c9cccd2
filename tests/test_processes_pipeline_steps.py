"""A pipeline's step in real processes: several calls, other losses, evaluation, other lengths, and what goes wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_runs import LLAMA, Recipe, batch, pipeline_of, replica_of, unsharded
from processes import RanksFailed, on_ranks, stop
from small_models import meta_model, whole
from torch import Tensor, nn

import shardplan
from shardplan.proof.compare import TOLERANCE, relative_error
from shardplan.runtime.apply import phases
from shardplan.runtime.training import get_grad_norm

TIED = Recipe("qwen2", {"pp": 2}, tied=True)
SPLIT = Recipe("llama", {"pp": 2, "tp": 2})


def gradients_of(pipeline: shardplan.Pipeline) -> dict[str, Tensor]:
    return {name: whole(p.grad).clone() for name, p in pipeline.named_parameters() if p.grad is not None}


def halves(inputs: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [dict(zip(inputs, parts, strict=True)) for parts in zip(*(x.chunk(2) for x in inputs.values()), strict=True)]


def in_two_calls(recipe: Recipe) -> dict[str, Any]:
    pipeline = pipeline_of(replace(recipe, micro_batches=2))
    inputs = batch(recipe, 0, replica_of(pipeline))
    tokens = (inputs["labels"][:, 1:] != -100).sum()
    if recipe.replicas > 1:
        dist.all_reduce(tokens, group=pipeline.layout.mesh.mesh["dp_shard"].get_group())
    first, second = halves(inputs)
    loss = pipeline.step(**first, accumulate=True, tokens=tokens, calls=2)
    with pytest.raises(ValueError, match="call step once more without"):
        get_grad_norm(pipeline)
    with pytest.raises(ValueError, match="an optimizer step of several calls needs two arguments"):
        pipeline.step(**second)
    loss += pipeline.step(**second, tokens=tokens, calls=2)
    with pytest.raises(ValueError, match="has a gradient of an earlier step"):
        pipeline.step(**second)
    with pytest.raises(ValueError, match="call get_grad_norm\\(pipeline"):
        get_grad_norm(pipeline.parameters())
    return {"loss": loss.item(), "gradients": gradients_of(pipeline)}


@pytest.mark.parametrize("sizes", [{"pp": 2}, pytest.param({"pp": 2, "dp_shard": 2}, marks=pytest.mark.slow)], ids=str)
def test_two_calls_are_one_with_twice_the_micro_batches(sizes: dict[str, int]) -> None:
    recipe = replace(TIED, sizes=sizes)
    runs, (expected, *_) = on_ranks(recipe.ranks, in_two_calls, recipe), unsharded(recipe)
    for run in runs:
        assert run["loss"] == pytest.approx(expected.loss, rel=1e-6)
        for name, gradient in run["gradients"].items():
            wanted = expected.gradients.get(name, expected.gradients["model.embed_tokens.weight"])
            assert wanted is not None
            assert relative_error(gradient, wanted) <= TOLERANCE[torch.float64], name


def nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Of the tokens themselves, not of the next ones."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def with_own_loss(recipe: Recipe) -> dict[str, Any]:
    pipeline = pipeline_of(replace(recipe, options={"loss_fn": nll}))
    inputs = batch(recipe, 0, replica_of(pipeline))
    with torch.no_grad():
        evaluated = pipeline.step(**inputs)
    assert not gradients_of(pipeline)
    return {"evaluated": evaluated.item(), "loss": pipeline.step(**inputs).item(), "gradients": gradients_of(pipeline)}


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("interleaved", marks=pytest.mark.slow)])
def test_a_loss_of_ones_own_and_evaluation(schedule: str) -> None:
    recipe = replace(TIED, tied=False, schedule=schedule)
    runs, model = on_ranks(2, with_own_loss, recipe), recipe.build()
    inputs = batch(recipe, 0, 0)
    labels = inputs.pop("labels")
    loss = nll(model(**inputs, use_cache=False).logits, labels) / (labels != -100).sum()
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for run in runs:
        assert run["evaluated"] == run["loss"] == pytest.approx(loss.item(), rel=1e-6)
        for name, gradient in run["gradients"].items():
            assert relative_error(gradient, expected[name]) <= TOLERANCE[torch.float64], name


def of_other_lengths(recipe: Recipe) -> int:
    pipeline = pipeline_of(recipe)
    measured = 0
    for length in (8, 16, 24, 8, 40):
        pipeline.step(**batch(replace(recipe, lengths=(length,)), 0, 0))
        pipeline.zero_grad()
        measured += 1
    (known,) = pipeline._hand_overs.known.values()
    assert len(known) == 4
    widths = {handed.shape for handing in known.values() for sent in handing for handed in sent}
    assert widths == {(2, length // 2, 64) for length in (8, 16, 24, 40)}  # slices of the sequence
    odd = batch(replace(recipe, lengths=(9,)), 0, 0)
    with shardplan.without_sequence_parallel(pipeline), torch.no_grad():
        evaluated = pipeline.step(**odd)
        assert pipeline.step(**batch(replace(recipe, lengths=(8,)), 0, 0)) > 0
    expected = recipe.build()(**odd, use_cache=False).loss
    assert evaluated.item() == pytest.approx(expected.item(), rel=1e-6)
    return measured


@pytest.mark.slow
def test_lengths_may_change_between_steps() -> None:
    recipe = replace(SPLIT, sequence_parallel=True)
    assert on_ranks(4, of_other_lengths, recipe) == [5] * 4


# Calls that cannot be

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "rows": ({"input_ids": torch.zeros(6, 8, dtype=torch.long)}, "6 rows, which 4 micro-batches do not divide"),
    "another first dim": (
        {"input_ids": torch.zeros(8, 8, dtype=torch.long), "position_ids": torch.zeros(3, 8, 8)},
        "position_ids has the shape",
    ),
    "a cache": ({"input_ids": torch.zeros(8, 8, dtype=torch.long), "use_cache": True}, "use_cache in a pipeline step"),
    "hidden states": (
        {"input_ids": torch.zeros(8, 8, dtype=torch.long), "output_hidden_states": True},
        "output_hidden_states in a pipeline step",
    ),
    "no labels": ({"input_ids": torch.zeros(8, 8, dtype=torch.long)}, "needs labels"),
    "nothing": ({}, "needs the batch by keywords"),
}
PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "stages per rank": ({"stages_per_rank": 2}, "1f1b has 1 stage on each rank, not 2"),
    "sizes": (
        {"pipeline_parallel": {"layers": "model.layers.*", "sizes": [1, 1, 1, 1]}},
        "1f1b has 1 stage on each rank, not 2",
    ),
    "blocks": ({"schedule": "interleaved", "stages_per_rank": 3, "micro_batches": 6}, "4 blocks, too few for 6 stages"),
    "no such schedule": ({"schedule": "2f2b"}, "there is no pipeline schedule '2f2b'"),
    "a schedule that was": ({"schedule": "zbv"}, "the schedules are gpipe, 1f1b, interleaved"),
    "micro-batches": ({"micro_batches": 0}, "micro_batches must be at least 1"),
}


def wrong_calls() -> None:
    recipe = Recipe("llama", {"pp": 2})
    for options, text in PLANS.values():
        model = recipe.build()
        with pytest.raises(ValueError, match=text):
            _apply(model, {"pp": 2}, **options)
        model(input_ids=torch.ones(1, 4, dtype=torch.long))  # it is untouched
    pipeline = pipeline_of(recipe)
    for inputs, text in WRONG.values():
        with pytest.raises(ValueError, match=text):
            pipeline.step(**inputs)
    with pytest.raises(TypeError, match="a pipeline has no forward"):
        pipeline(input_ids=None)
    with pytest.raises(ValueError, match="a stage runs only inside a pipeline's step"):
        pipeline.parts[0](input_ids=torch.ones(1, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="generate needs the whole model"):
        pipeline.parts[0].generate(torch.ones(1, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="this model is unusable: it was cut into pipeline stages"):
        given = recipe.build()
        _apply(given, {"pp": 2})
        shardplan.applied(given)
    with pytest.raises(RuntimeError, match="it was cut into pipeline stages"):
        given(input_ids=None)
    assert "2 stages of 2, 2 blocks, schedule 1f1b, 4 micro-batches" in str(shardplan.applied(pipeline))


def _apply(model: nn.Module, sizes: dict[str, int], **options: Any) -> shardplan.Pipeline:
    own = {name: options[name] for name in ("schedule", "micro_batches", "stages_per_rank") if name in options}
    given = {"pipeline_parallel": dict(LLAMA), "prove": False, **options}
    given = {name: value for name, value in given.items() if name not in own}
    given.setdefault("pipeline", shardplan.PipelineOptions(**{"micro_batches": 4, **own}))
    return shardplan.apply_plan(model, shardplan.build_mesh(**sizes), "auto", **given)


def test_wrong_calls_are_refused() -> None:
    on_ranks(2, wrong_calls)


def wrong_meshes() -> None:
    recipe = Recipe("llama", {"pp": 2})
    for sizes, options, text in (
        ({"pp": 2, "cp": 2, "dp_shard": 1}, {}, "pipeline stages do not work with context parallelism"),
        ({"dp_shard": 2, "tp": 2}, {}, "no axis pp"),
    ):
        with pytest.raises(ValueError, match=text):
            _apply(recipe.build(), sizes, **options)
    with pytest.raises(TypeError, match="pipeline must be a PipelineOptions"):
        _apply(recipe.build(), {"pp": 2, "dp_shard": 2}, pipeline={"schedule": "1f1b"})


@pytest.mark.slow
@pytest.mark.refuses("pp cp")
def test_wrong_meshes_and_backends_are_refused() -> None:
    on_ranks(4, wrong_meshes)


# What belongs to others


def stored_bytes(meta: bool) -> tuple[int, int]:
    recipe = Recipe("llama", {"pp": 2}, dtype=torch.float32)
    model = meta_model("llama", num_hidden_layers=4) if meta else recipe.build()
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    absent = [p for name, p in model.named_parameters() if f"layers.{3 - 2 * dist.get_rank()}." in name]
    alive = [torch.utils.weak.WeakIdRef(p) for p in absent] if meta else []
    pipeline = _apply(model, {"pp": 2})
    if meta:
        shardplan.materialize(pipeline, "cpu")
    else:
        import weakref

        alive = [weakref.ref(p) for p in absent]
        del absent
        assert all(one() is None for one in alive), "the given model keeps what other stages have"
    return sum(p.numel() * p.element_size() for p in pipeline.parameters()), total


@pytest.mark.parametrize("meta", [False, True], ids=["cpu", "meta"])
def test_what_other_stages_have_costs_nothing(meta: bool) -> None:
    runs = on_ranks(2, stored_bytes, meta)
    assert sum(own for own, _ in runs) == runs[0][1]
    assert max(own for own, _ in runs) < 0.6 * runs[0][1]


# A rank that dies


def dies() -> None:
    pipeline = pipeline_of(Recipe("llama", {"pp": 2}))
    if dist.get_rank() == 1:
        pipeline.parts[0].get_submodule("model.norm").register_forward_hook(lambda *_: os._exit(3))
    pipeline.step(**batch(Recipe("llama", {"pp": 2}), 0, 0))


def test_a_rank_that_dies_ends_all() -> None:
    with pytest.raises(RanksFailed) as failed:
        on_ranks(2, dies, seconds=60.0)
    assert failed.value.errors[1] == "died with exit code 3"
    assert "a pipeline step failed on pp rank 0, which has the stages 0" in failed.value.errors[0]


def impatient(folder: Path) -> None:
    """Another process group, with a short time-out."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = f"file://{folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=TIME_OUT)


@pytest.fixture
def on_impatient_ranks(tmp_path: Path) -> Iterator[Callable[..., list[Any]]]:
    """As `on_ranks`, for one call."""
    yield lambda count, function: on_ranks(count, function, tmp_path)
    stop()


TIME_OUT = timedelta(seconds=20)


def raises_and_stays(folder: Path) -> tuple[str, float]:
    impatient(folder)
    pipeline = pipeline_of(Recipe("llama", {"pp": 2}))
    if dist.get_rank() == 1:
        pipeline.parts[0].get_submodule("model.norm").register_forward_hook(fails)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as told:
        pipeline.step(**batch(Recipe("llama", {"pp": 2}), 0, 0))
    seconds = time.monotonic() - start
    with pytest.raises(RuntimeError, match="an earlier step of this pipeline failed"):
        pipeline.step(**batch(Recipe("llama", {"pp": 2}), 0, 0))
    return str(told.value), seconds


def fails(*_: Any) -> None:
    raise ValueError("a norm that fails")


@pytest.mark.slow
def test_a_rank_that_raises_is_named_on_the_others_within_the_time_out(on_impatient_ranks: Any) -> None:
    """It does not end; what waits for it does, at the time-out."""
    (waited, seconds), (raised, _) = on_impatient_ranks(2, raises_and_stays)
    assert "failed on pp rank 1, which has the stages 1: ValueError: a norm that fails" in raised
    assert "rank 1 failed first: ValueError: a norm that fails" in waited and seconds < 3 * TIME_OUT.seconds


def frozen_between_steps(folder: Path) -> str:
    impatient(folder)
    recipe = Recipe("llama", {"pp": 2})
    pipeline = pipeline_of(recipe)
    pipeline.step(**batch(recipe, 0, 0))
    pipeline.zero_grad()
    for name, parameter in pipeline.named_parameters():
        parameter.requires_grad_("embed_tokens" not in name)
    with pytest.raises((ValueError, RuntimeError)) as told:
        pipeline.step(**batch(recipe, 1, 0))
    return str(told.value)


@pytest.mark.slow
def test_requires_grad_that_changes_is_an_error(on_impatient_ranks: Any) -> None:
    text, waited = on_impatient_ranks(2, frozen_between_steps)
    assert text.startswith("model.embed_tokens.weight is not trained any more (1 in all), but the stages send")
    assert "rank 0 failed first: ValueError: model.embed_tokens.weight is not trained any more" in waited


# Ranks that differ


def another_batch() -> str:
    recipe = Recipe("llama", {"pp": 2})
    with pytest.raises(RuntimeError) as told:
        pipeline_of(recipe).step(**batch(recipe, dist.get_rank(), 0))
    return str(told.value)


def test_stages_need_the_same_batch() -> None:
    for text in on_ranks(2, another_batch):
        assert (
            "pipeline-parallel ranks need the same batch" in text and "input_ids on rank 1; labels on rank 1." in text
        )


def another_seed() -> str:
    model = TIED.build()
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(dist.get_rank())
    pipeline = _apply(model, {"pp": 2})
    with pytest.raises(RuntimeError) as told:
        pipeline.step(**batch(TIED, 0, 0))
    return str(told.value)


def test_copies_of_a_tied_parameter_are_compared() -> None:
    for text in on_ranks(2, another_seed):
        assert "different values of the tied parameter model.embed_tokens.weight = lm_head.weight" in text


def one_cannot(monkeypatch: pytest.MonkeyPatch) -> str:
    def fail(work: Any) -> bool:
        raise ValueError("this rank cannot")

    changed = tuple((name, fail if name == "compile" else phase) for name, phase in phases.PHASES)
    if dist.get_rank() == 1:
        monkeypatch.setattr(phases, "PHASES", changed)
    with pytest.raises(RuntimeError) as told:
        pipeline_of(Recipe("llama", {"pp": 2, "tp": 2}))
    return str(told.value)


def applying_fails_on_one() -> str:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return one_cannot(monkeypatch)


@pytest.mark.slow
def test_a_rank_that_cannot_apply_is_named_on_all() -> None:
    first, *others = sorted(on_ranks(4, applying_fails_on_one), key=lambda text: "this rank cannot" not in text)
    assert "failed in the step 'compile': this rank cannot" in first
    assert all("failed in the step 'compile': rank 1 failed" in text for text in others)


# A model of one's own


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 32):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, width), nn.Linear(width, 64)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


NET_PLAN = {
    "version": "1",
    "name": "net",
    "tensor_parallel": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
    "data_parallel": {"units": ["blocks.*"]},
    "pipeline_parallel": {"layers": "blocks.*"},
}


def some_ids(seed: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 64, (8, 8), generator=torch.Generator().manual_seed(seed))}


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def of_ones_own() -> tuple[float, dict[str, Tensor | None], str]:
    mesh, ids = shardplan.build_mesh(pp=2, tp=2), some_ids(1)["input_ids"]
    pipeline = shardplan.apply_plan(
        shardplan.Model(net(), inputs=some_ids),
        mesh,
        NET_PLAN,
        pipeline=shardplan.PipelineOptions(micro_batches=4, loss_fn=nll),
    )
    loss = pipeline.step(input_ids=ids, labels=ids)
    gradients = {name: gradient for name, _, gradient in shardplan.full_parameters(pipeline, gradients=True)}
    return loss.item(), gradients, shardplan.applied(pipeline).proof


@pytest.mark.slow
def test_a_model_of_ones_own_is_proven_and_right() -> None:
    model, ids = net(), some_ids(1)["input_ids"]
    expected = nll(model(ids), ids) / ids.numel()
    expected.backward()
    for loss, gradients, proof in on_ranks(4, of_ones_own):
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        assert "proven" in proof and "not proven" not in proof
        for name, parameter in model.named_parameters():
            assert relative_error(gradients[name], parameter.grad) <= TOLERANCE[torch.float32], name
