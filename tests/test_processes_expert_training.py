"""Training with distributed experts: optimizer steps, micro-batches, checkpointed activations, auxiliary losses, and routes that leave
ranks or experts without tokens. The unsharded model is the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from collective_counter import CollectiveCounter
from expert_runs import Case, batch, build, equal_to_the_unsharded, of, planned, step
from peft import LoraConfig, inject_adapter_in_model
from processes import on_ranks
from small_models import share_of, whole_state
from torch import Tensor, nn
from training_runs import ADAMW

import shardplan
from shardplan.proof.compare import TOLERANCE, relative_error

STEPS, MAX_NORM = 3, 0.5
DOUBLE = torch.float64


@dataclass(frozen=True)
class Training:
    """A training run.

    Args:
        adamw: its options.
        micro_batches: of a step.
    """

    case: Case
    adamw: tuple[tuple[str, Any], ...] = (("foreach", True),)
    micro_batches: int = 1

    def train(
        self, model: nn.Module, losses_of: Callable[[int], list[Tensor]]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The norm of each step, and the whole parameters at the end.

        Args:
            losses_of: runs forward and backward of a step.
        """
        optimizer, norms = torch.optim.AdamW(model.parameters(), **ADAMW, **dict(self.adamw)), []
        for number in range(STEPS):
            losses_of(number)
            norms.append(shardplan.clip_grad_norm_(model, MAX_NORM))
            optimizer.step()
            optimizer.zero_grad()
        return norms, whole_state(model)


def trains_as_the_unsharded(runs: list[Training]) -> None:
    for run in runs:
        model, mesh = planned(run.case)
        own, data_ranks = share_of(mesh)

        def loss_of(model: nn.Module, number: int, micro: int, data_rank: int) -> Tensor:
            ids = batch(number, micro, data_rank, tokens=run.case.tokens)
            return model(input_ids=ids, labels=ids, use_cache=False).loss

        def sharded(number: int) -> None:
            rows, length = run.case.tokens
            counted = partial(shardplan.micro_batches, labels=lambda micro: rows * (length - 1))
            for micro, scale in counted(model, range(run.micro_batches)):
                (loss_of(model, number, micro, own) * scale).backward()

        def unsharded(number: int) -> None:
            for micro in range(run.micro_batches):
                for data_rank in range(data_ranks):
                    (loss_of(reference, number, micro, data_rank) / data_ranks / run.micro_batches).backward()

        norms, state = run.train(model, sharded)
        reference = build(run.case)
        expected_norms, expected = run.train(reference, unsharded)
        limit = TOLERANCE[run.case.dtype]
        assert min(expected_norms) > 1.2 * MAX_NORM, "clipping must bite"
        assert all(relative_error(*pair) <= limit for pair in zip(norms, expected_norms, strict=True)), (run, norms)
        assert state.keys() == expected.keys()
        wrong = {name: error for name, x in state.items() if (error := relative_error(x, expected[name])) > limit}
        assert not wrong, (run, wrong)


def double(model: str, **given: Any) -> Case:
    return replace(of(model, **given), dtype=DOUBLE)


@pytest.mark.proves("ep fsdp2")
def test_two_ranks_train() -> None:
    on_ranks(2, trains_as_the_unsharded, [Training(double("mixtral", dp_shard=2, ep=2), micro_batches=2)])


def recomputed(mode: str) -> tuple[tuple[str, Any], ...]:
    return (("activation_checkpointing", {"mode": mode}),)


def adapted(model: nn.Module) -> None:
    """With adapters of peft, which alone are trained."""
    targets = ["q_proj", "v_proj", "o_proj"]
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=64, target_modules=targets, init_lora_weights=False), model)


FOUR = [
    Training(double("qwen3_moe", dp_shard=2, tp=2, ep=4), micro_batches=2),
    Training(of("deepseek_v3", dp_shard=4, ep=2, implementation="grouped_mm"), (("fused", True),)),
    Training(double("gpt_oss", dp_replicate=2, dp_shard=2, ep=2), (("fused", True),)),
    Training(replace(double("mixtral", dp_shard=4, ep=4), options=recomputed("full")), micro_batches=2),
    Training(
        replace(double("qwen3_moe", dp_shard=2, tp=2, ep=2, sequence_parallel=True), options=recomputed("selective"))
    ),
    Training(replace(double("mixtral", dp_shard=2, tp=2, ep=4), change=adapted)),
]


@pytest.mark.slow
@pytest.mark.proves(
    "tp ep fsdp2", "ep fsdp2", "ep hsdp", "ep fsdp2 checkpointing", "tp sp ep fsdp2 checkpointing", "tp ep fsdp2 lora"
)
def test_four_ranks_train() -> None:
    on_ranks(4, trains_as_the_unsharded, FOUR)


def exchanges(cases: list[Case]) -> list[tuple[int, int]]:
    """Those of a step, in forward and in backward, after a forward without a backward: it leaves what is gathered in its place."""
    found = []
    for case in cases:
        model, mesh = planned(case)
        ids = batch(share_of(mesh)[0])
        step(model, ids)
        with torch.no_grad():
            model(input_ids=ids)
        counts = []
        with CollectiveCounter() as counter:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            counts.append(counter.counts["all_to_all"])
            loss.backward()
            counts.append(counter.counts["all_to_all"] - counts[0])
        found.append(tuple(counts))
    return found


@pytest.mark.slow
def test_selective_checkpoints_keep_what_was_exchanged() -> None:
    cases = [
        replace(case, options=options)
        for case in (of("mixtral", dp_shard=4, ep=2), of("mixtral", dp_shard=4, ep=4, exchange="pairs"))
        for options in ((), recomputed("selective"), recomputed("full"))
    ]
    once, pairs = 1 + 3 + 1, 1 + 1 + 1  # numbers, tokens with weights and ids, results
    for found in on_ranks(4, exchanges, cases):
        for forward, (plain, selective, full) in ((once, found[:3]), (pairs, found[3:])):
            assert plain == selective == (2 * forward, plain[1])  # of two layers
            assert full == (2 * forward, plain[1] + 2 * forward)


# The auxiliary loss is a mean over the batch of a rank, as with data parallelism.
AUXILIARY = (("output_router_logits", True), ("router_aux_loss_coef", 0.3))


def skewed(model: nn.Module) -> None:
    """Route all tokens to the first ranks' experts: the others have none, and send all of theirs away."""
    found = False
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("router.bias", "e_score_correction_bias")):
            value[:3] += 20
            found = True
    assert found


ROUTES = [
    replace(of("mixtral", dp_shard=4, ep=2), settings=AUXILIARY),
    replace(of("qwen3_moe", dp_shard=2, tp=2, ep=4), settings=AUXILIARY),
    replace(of("gpt_oss", dp_shard=4, ep=4), change=skewed),
    replace(of("gpt_oss", dp_shard=4, ep=4, implementation="grouped_mm", exchange="pairs"), change=skewed),
    replace(of("deepseek_v3", dp_shard=2, tp=2, ep=4), change=skewed, options=recomputed("full")),
    replace(of("mixtral", dp_shard=2, tp=2, ep=4), tokens=(1, 5)),
    replace(of("gpt_oss", dp_shard=1, tp=4, ep=4, exchange="pairs"), tokens=(1, 3)),  # a rank without tokens
    replace(of("deepseek_v3", dp_shard=1, tp=4, ep=2), tokens=(3, 3)),
]


@pytest.mark.slow
def test_routes() -> None:
    on_ranks(4, equal_to_the_unsharded, ROUTES, seconds=100.0)


def gradients_of(case: Case) -> dict[str, Tensor]:
    model, mesh = planned(case)
    loss, _ = step(model, batch(share_of(mesh)[0]))
    return {"loss": loss, **{name: p.grad.to_local() for name, p in model.named_parameters()}}


def runs_are_alike(cases: list[Case]) -> None:
    for case in cases:
        first, second = gradients_of(case), gradients_of(case)
        assert all(torch.equal(x, second[name]) for name, x in first.items()), case


@pytest.mark.slow
def test_two_runs_are_bit_equal() -> None:
    on_ranks(
        4, runs_are_alike, [of("qwen3_moe", dp_shard=2, tp=2, ep=4), of("gpt_oss", dp_shard=4, ep=2, exchange="pairs")]
    )
