"""Calls of a pipeline's step with what not every step has: flags that change what is computed, losses of one's own, inputs of a loss."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from pipeline_runs import Recipe, batch, pipeline_of, replica_of
from processes import RanksFailed, on_ranks
from torch import Tensor, nn

import shardplan
from shardplan.proof.compare import TOLERANCE, relative_error
from shardplan.runtime.training import log_probabilities

ROUTED = Recipe(
    "qwen3_moe",
    {"pp": 2},
    section={"layers": "model.layers.*", "carry": ["model.layers.*.mlp.gate"]},
    settings={"mlp_only_layers": [], "output_router_logits": False, "router_aux_loss_coef": 0.5},
)


def found(pipeline: shardplan.Pipeline, loss: Tensor) -> tuple[float, dict[str, Tensor | None]]:
    gradients = {name: gradient for name, _, gradient in shardplan.full_parameters(pipeline, gradients=True)}
    return loss.item(), gradients


def held(runs: list[Any], model: nn.Module, loss: Tensor) -> None:
    """Hold what every rank has against the unsharded model's."""
    loss.backward()
    for own, gradients in runs:
        assert own == pytest.approx(loss.item(), rel=1e-6)
        for name, parameter in model.named_parameters():
            assert (gradients[name] is None) == (parameter.grad is None), name
            if parameter.grad is not None:
                assert relative_error(gradients[name], parameter.grad) <= TOLERANCE[torch.float64], name


def parts(inputs: dict[str, Tensor], count: int = 4) -> list[dict[str, Tensor]]:
    return [dict(zip(inputs, one, strict=True)) for one in zip(*(x.chunk(count) for x in inputs.values()), strict=True)]


def routed(recipe: Recipe, *, field: bool) -> Any:
    """Without it first: nothing more than hidden states is handed on then."""
    pipeline = pipeline_of(recipe)
    pipeline.step(**batch(recipe, 0, 0))
    pipeline.zero_grad()
    (handing,) = (known for kept in pipeline._hand_overs.known.values() for known in kept.values())
    assert all(one.shape == (0,) for sent in handing for one in sent[1:])
    flag = {} if field else {"output_router_logits": True}
    for part in pipeline.parts:
        part.config.output_router_logits = field
    with torch.no_grad():
        pipeline.step(**flag, **batch(recipe, 0, 0))
    return found(pipeline, pipeline.step(**flag, **batch(recipe, 0, 0)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "interleaved", pytest.param("tp", marks=pytest.mark.exhaustive)])
@pytest.mark.proves("pp", "pp tp sp")
def test_a_flag_of_the_call_adds_the_routers_loss(name: str) -> None:
    recipe = (
        replace(ROUTED, sizes={"pp": 2, "tp": 2}, sequence_parallel=True)
        if name == "tp"
        else replace(ROUTED, schedule=name)
    )
    runs, model = on_ranks(recipe.ranks, partial(routed, field=name == "interleaved"), recipe), recipe.build()
    given = batch(recipe, 0, 0)
    tokens, loss = (given["labels"][:, 1:] != -100).sum(), torch.zeros((), dtype=torch.float64)
    for part in parts(given):
        output = model(**part, use_cache=False, output_router_logits=True)
        own = (part["labels"][:, 1:] != -100).sum()
        flat = output.loss - 0.5 * output.aux_loss
        loss = loss + flat * own / tokens + 0.5 * output.aux_loss / 4
    held(runs, model, loss)


# Loss functions that somebody put in the place of the model's own


def dividing(logits: Tensor, labels: Tensor, num_items_in_batch: Any = None, **kwargs: Any) -> Tensor:
    """Of next tokens, with smoothed labels."""
    shifted, dividend = labels[:, 1:].flatten(), num_items_in_batch
    total = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), shifted, reduction="sum", label_smoothing=0.1)
    return total / ((shifted != -100).sum() if dividend is None else dividend)


def ignoring(logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    """The mean over its own tokens, whatever number is given."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def summing(logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def unshifted(logits: Tensor, labels: Tensor, num_items_in_batch: Any = None, **kwargs: Any) -> Tensor:
    total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def with_dividing(model: Any) -> None:
    model.loss_function = dividing


def with_ignoring(model: Any) -> None:
    model.loss_function = ignoring


def with_summing(model: Any) -> None:
    model.loss_function = summing


def with_unshifted(model: Any) -> None:
    model.loss_function = unshifted


LLAMA = Recipe("llama", {"pp": 2}, change=with_dividing)


def stepped(recipe: Recipe, tokens: int | None = None) -> Any:
    pipeline = pipeline_of(recipe)
    return found(pipeline, pipeline.step(tokens=tokens, **batch(recipe, 0, 0)))


@pytest.mark.slow
@pytest.mark.parametrize("change", [with_dividing, with_ignoring, with_unshifted])
def test_a_loss_function_that_was_put_there(change: Any) -> None:
    recipe = replace(LLAMA, change=change)
    given = batch(recipe, 0, 0)
    tokens = int((given["labels"] != -100).sum()) if change is with_unshifted else None
    runs, model = on_ranks(2, stepped, recipe, tokens), recipe.build()
    held(runs, model, model(**given, use_cache=False).loss)


def looped(recipe: Recipe) -> None:
    pipeline = pipeline_of(recipe)
    for given, _ in shardplan.micro_batches(pipeline, [batch(recipe, step, 0) for step in range(2)]):
        pipeline.step(**given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "change", "text"),
    [
        (stepped, with_summing, "neither divides by `num_items_in_batch`"),
        (stepped, with_unshifted, "tokens where a step counts"),
        (looped, with_unshifted, "tokens where a step counts"),
    ],
)
def test_a_loss_function_that_counts_otherwise_is_refused(run: Any, change: Any, text: str) -> None:
    with pytest.raises(RanksFailed) as failed:
        on_ranks(2, run, replace(LLAMA, change=change), seconds=60.0)
    assert text in failed.value.errors[1]


# Inputs of a loss: what it reads besides the logits is in `labels`


def policy_loss(logits: Tensor, labels: dict[str, Tensor]) -> Tensor:
    """The clipped policy gradient, summed over the tokens of completions."""
    ratio = (log_probabilities(logits, labels["ids"], shift=True) - labels["old"]).exp()
    gain = labels["advantages"][:, None]
    return -(torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain) * labels["completion"]).sum()


def experience(recipe: Recipe, replica: int) -> dict[str, Any]:
    """One micro-batch has no completion."""
    given = batch(recipe, 0, replica)
    generator = torch.Generator().manual_seed(replica)
    ids = given["input_ids"]
    completion = (torch.rand(ids[:, 1:].shape, generator=generator) < 0.5).double()
    completion[2:4] = 0
    old = -5 + torch.randn(ids[:, 1:].shape, generator=generator, dtype=torch.float64)
    advantages = torch.randn(len(ids), generator=generator, dtype=torch.float64)
    labels = {"ids": ids, "old": old, "advantages": advantages, "completion": completion}
    return {"input_ids": ids, "attention_mask": given["attention_mask"], "labels": labels}


def reinforced(recipe: Recipe, tokens: int) -> Any:
    pipeline = pipeline_of(recipe)
    given = experience(recipe, replica_of(pipeline))
    with pytest.raises(
        ValueError, match="labels are not a tensor, so the step cannot count their tokens: pass `tokens`"
    ):
        pipeline.step(**given)
    return found(pipeline, pipeline.step(tokens=tokens, **given))


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe("llama", {"pp": 2}, options={"loss_fn": policy_loss}),
        pytest.param(
            Recipe("llama", {"pp": 2}, schedule="interleaved", options={"loss_fn": policy_loss}),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            Recipe("llama", {"pp": 2, "tp": 2}, options={"loss_fn": policy_loss}, sequence_parallel=True),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            Recipe("llama", {"pp": 2, "dp_shard": 2}, options={"loss_fn": policy_loss}), marks=pytest.mark.exhaustive
        ),
    ],
    ids=["pp", "interleaved", "tp", "dp"],
)
@pytest.mark.proves("pp", "pp tp sp", "pp fsdp2")
def test_a_loss_that_reads_more_than_labels(recipe: Recipe) -> None:
    every = [experience(recipe, replica) for replica in range(recipe.replicas)]
    tokens = int(sum(one["labels"]["completion"].sum() for one in every))
    runs, model = on_ranks(recipe.ranks, reinforced, recipe, tokens), recipe.build()
    loss = torch.zeros((), dtype=torch.float64)
    for one in every:
        logits = model(input_ids=one["input_ids"], attention_mask=one["attention_mask"], use_cache=False).logits
        loss = loss + policy_loss(logits, one["labels"]) / tokens
    held(runs, model, loss)
