"""README's loop on unequal numbers of labels, and the loops next to it, against one process with the same global batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_counter import CollectiveCounter
from processes import on_ranks
from small_models import VOCABULARY, small_model, whole
from torch import Tensor, nn
from training_runs import ADAMW

import shardplan
from shardplan.proof.compare import TOLERANCE, relative_error

STEPS, MICRO, MAX_NORM = 3, 2, 0.5
Batch = dict[str, Tensor]
Number = Callable[[Tensor, Tensor], Tensor]


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@dataclass(frozen=True)
class Case:
    """A run.

    Args:
        own: a loss of the loop's own, by what it is.
        dry: whether a data-parallel rank has a micro-batch without labels.
        rules: a section `context_parallel`, with which each rank of cp is given the whole batch.
    """

    model: str
    sizes: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    own: tuple[str, Number] | None = None
    dry: bool = True
    rules: Mapping[str, str] = field(default_factory=dict)

    def build(self) -> nn.Module:
        return small_model(self.model, dtype=torch.float64, num_hidden_layers=4 if "pp" in self.sizes else 2)

    @property
    def shares(self) -> int:
        return self.sizes.get("dp_shard", 1) * self.sizes.get("dp_replicate", 1)

    def batches(self, step: int, share: int) -> list[Batch]:
        found = []
        for micro in range(MICRO):
            draw = torch.Generator().manual_seed(1_000 * step + 10 * share + micro)
            ids = torch.randint(10, VOCABULARY, (4, 16), generator=draw)
            labels = ids.masked_fill(torch.rand(ids.shape, generator=draw) < 0.3 + 0.3 * share, -100)
            if self.dry and share == self.shares - 1 and micro == 0:
                labels = torch.full_like(ids, -100)
            found.append({"input_ids": ids, "labels": labels})
        return found


@dataclass
class Step:
    loss: float
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def trained(model: Any, step_of: Callable[[int], float]) -> list[Step]:
    optimizer, found = torch.optim.AdamW(model.parameters(), **ADAMW), []
    for number in range(STEPS):
        loss = step_of(number)
        named = dict(model.named_parameters())
        gradients = {name: whole(p.grad).clone() for name, p in named.items() if p.grad is not None}
        shardplan.clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad() if isinstance(model, nn.Module) else model.zero_grad()
        found.append(Step(loss, gradients, {name: whole(p.detach()).clone() for name, p in named.items()}))
    return found


def on_one_process(case: Case) -> list[Step]:
    model = case.build()

    def step(number: int) -> float:
        every = [batch for share in range(case.shares) for batch in case.batches(number, share)]
        tokens, total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in every), 0.0
        for batch in every:
            output = model(input_ids=batch["input_ids"], use_cache=False)
            loss = summed(output.logits, batch["labels"]) / tokens
            if (auxiliary := getattr(output, "aux_loss", None)) is not None and case.own is None:
                loss = loss + model.router_aux_loss_coef * auxiliary / len(every)
            loss.backward()
            total += loss.item()
        return total

    return trained(model, step)


def loss_of(model: nn.Module, batch: Batch, case: Case) -> Tensor:
    if case.own is None:
        return model(**batch, use_cache=False).loss
    return case.own[1](model(input_ids=batch["input_ids"], use_cache=False).logits, batch["labels"])


def trains_as_one_process(cases: Iterable[Case]) -> None:
    for case in cases:
        try:
            _trains_as_one_process(case)
        except BaseException as error:
            error.add_note(f"{case}")
            raise


def _trains_as_one_process(case: Case) -> None:
    mesh = shardplan.build_mesh(**case.sizes)
    rules = {"version": "1", "name": "long", "extends": case.model, "context_parallel": dict(case.rules)}
    model = shardplan.apply_plan(case.build(), mesh, rules if case.rules else "auto", prove=False, **case.options)
    axes = [axis for axis in ("dp_replicate", "dp_shard") if axis in (mesh.mesh_dim_names or ())]
    share = 0
    for axis in axes:
        share = share * mesh[axis].size() + mesh.get_local_rank(axis)
    how: dict[str, Any] = {} if case.own is None else {"loss": case.own[0], "labels": lambda b: b["labels"][:, 1:]}

    def step(number: int) -> float:
        total = torch.zeros((), dtype=torch.float64)
        for batch, scale in shardplan.micro_batches(model, case.batches(number, share), **how):
            if isinstance(model, shardplan.Pipeline):
                total += model.step(**batch) * scale
                continue
            chunks = "cp" in case.sizes and not case.rules
            cut = shardplan.context_parallel(model, **batch) if chunks else nullcontext(batch)
            with cut as own:
                loss = loss_of(model, own, case) * scale
                loss.backward()
            total += loss.detach()
        if isinstance(model, nn.Module):
            for axis in (*axes, *(["cp"] if "cp" in case.sizes else [])):
                dist.all_reduce(total, group=mesh[axis].get_group())
                total /= mesh[axis].size()
        return total.item()

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # this loop is none to be warned of
        warnings.filterwarnings("ignore", message=".*(micro-batches for|redistribut|deprecat).*")
        run = trained(model, step)
    prefix = "module." if isinstance(model, nn.parallel.DistributedDataParallel) else ""
    for number, (own, reference) in enumerate(zip(run, on_one_process(case), strict=True)):
        assert own.loss == pytest.approx(reference.loss, rel=1e-6), f"the loss of step {number}"
        for kind in ("gradients", "parameters"):
            there = getattr(own, kind)
            assert there or isinstance(model, shardplan.Pipeline)
            for name, value in there.items():
                error = relative_error(value, getattr(reference, kind)[name.removeprefix(prefix)])
                assert error <= TOLERANCE[torch.float64], f"{kind} of step {number}: {name} is {error:.1e} off"


ON_CP = {
    "model.layers.0": "split_seq_input",
    "model.layers.*.self_attn": "exchange_heads",
    "model.norm": "gather_seq_output",
}
LLAMA = {"pipeline_parallel": {"layers": "model.layers.*"}}
CASES = {
    "dp 2, tp 2": Case("qwen3", {"dp_shard": 2, "tp": 2}, {"sequence_parallel": True}),
    "dp 2, tp 2, split logits": Case("llama", {"dp_shard": 2, "tp": 2}, {"logits": "sharded"}),
    "ep 2": Case("qwen3_moe", {"dp_shard": 2, "ep": 2}),
    "dp 2, pp 2": Case("llama", {"dp_shard": 2, "pp": 2}, {**LLAMA, "pipeline": shardplan.PipelineOptions("1f1b", 2)}),
    "dp 2, cp 2": Case("llama", {"dp_shard": 2, "cp": 2}),
    "cp 2, tp 2": Case("qwen3", {"dp_shard": 1, "cp": 2, "tp": 2}, {"sequence_parallel": True}),
    "dp 2, cp 2, rules": Case("qwen3", {"dp_shard": 2, "cp": 2}, rules=ON_CP),
    "hsdp": Case("llama", {"dp_replicate": 2, "dp_shard": 2}),
    "ddp": Case("llama", {"dp_replicate": 4, "dp_shard": 1}, {"data_parallel": {"backend": "ddp"}}),
    "a sum": Case("llama", {"dp_shard": 2, "tp": 2}, own=("sum", summed)),
    "a mean": Case("llama", {"dp_shard": 2, "tp": 2}, own=("mean", mean), dry=False),
    "tp alone": Case("llama", {"tp": 2}, dry=False),
}


def test_the_loop_of_the_readme_trains_as_one_process():
    on_ranks(4, trains_as_one_process, [CASES["dp 2, tp 2"], CASES["dp 2, pp 2"]])


@pytest.mark.slow
def test_the_other_loops_train_as_one_process():
    done = ("dp 2, tp 2", "dp 2, pp 2", "ep 2", "tp alone")
    on_ranks(4, trains_as_one_process, [case for name, case in CASES.items() if name not in done])
    on_ranks(2, trains_as_one_process, [CASES["ep 2"], CASES["tp alone"]])


# The trap


def warned(labels: int, weigh: Callable[[Tensor, int], Tensor], **given: Any) -> bool:
    """Whether a step is warned of, on a rank with so many labels."""
    mesh = shardplan.build_mesh()
    model = shardplan.apply_plan(small_model("llama"), mesh, "auto", prove=False)
    ids = torch.arange(10, 42).view(2, 16)
    batch = {"input_ids": ids, "labels": ids.masked_fill(torch.arange(16) > labels, -100)}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            weigh(model(**batch, **given).loss, labels).backward()
    texts = [str(one.message) for one in found if "micro_batches" in str(one.message)]
    assert len(texts) < 2, "it is said once"
    return bool(texts)


def traps() -> None:
    rank = dist.get_rank()
    unequal = 4 + 8 * rank
    plain: Callable[[Tensor, int], Tensor] = lambda loss, own: loss / 2  # noqa: E731
    assert warned(unequal, plain)
    assert not warned(8, plain)
    assert not warned(unequal, lambda loss, own: loss * own * 2 / 16)
    assert not warned(unequal, plain, num_items_in_batch=torch.tensor(16))


def refused() -> None:
    rank = dist.get_rank()
    model = shardplan.apply_plan(small_model("llama"), shardplan.build_mesh(), "auto", prove=False)
    ids = torch.arange(10, 42).view(2, 16)
    batch = {"input_ids": ids, "labels": ids}

    def loop(batches: list, body: Callable[[Any], Any] = lambda batch: None, **how: Any) -> None:
        for one, _ in shardplan.micro_batches(model, batches, **how):
            body(one)

    before = model.loss_function
    with pytest.raises(ValueError, match=r"unequal numbers of micro-batches \(1 on rank 0; 2 on rank 1\)"):
        loop([batch] * (1 + rank))
    with pytest.raises(RuntimeError, match="without the model's `loss_function`"):
        loop([batch], lambda one: model(input_ids=one["input_ids"]))
    assert model.loss_function is before
    with pytest.raises(ValueError, match="no token counts in 1 of"):
        loop([batch if rank else {**batch, "labels": torch.full_like(ids, -100)}], loss="mean")
    for batches, how, error, text in [
        ([ids], {}, TypeError, "pass labels=lambda batch"),
        ([{"input_ids": ids}], {}, ValueError, "a batch has no 'labels'"),
        (
            [batch],
            {"labels": lambda one: ids.float()},
            TypeError,
            "must be integers, bool or a count, not torch.float32",
        ),
        ([batch], {"loss": "tokens"}, ValueError, "loss must be"),
    ]:
        with pytest.raises(error, match=text):
            loop(batches, **how)
    own = shardplan.apply_plan(nn.Sequential(nn.Linear(4, 4)), shardplan.build_mesh(), "auto", prove=False)
    with pytest.raises(ValueError, match="FSDPSequential does not return a mean loss over next tokens"):
        shardplan.micro_batches(own, [batch])


def counted() -> None:
    rank = dist.get_rank()
    model = shardplan.apply_plan(small_model("llama"), shardplan.build_mesh(), "auto", prove=False)
    ids = torch.arange(10, 42).view(2, 16)
    batches = [{"input_ids": ids, "labels": ids.masked_fill(torch.arange(16) > 4 + 8 * rank, -100)}] * 2
    ways = [lambda b: b["labels"], lambda b: b["labels"] != -100, lambda b: int((b["labels"] != -100).sum()), "labels"]
    scales = [[scale for _, scale in shardplan.micro_batches(model, batches, labels=way, loss="sum")] for way in ways]
    assert scales == [[2 / (2 * 2 * (5 + 13))] * 2] * 4

    def collectives(batches: list[Batch]) -> Mapping[str, int]:
        with CollectiveCounter() as counter:
            for batch, scale in shardplan.micro_batches(model, batches):
                (model(**batch, use_cache=False).loss * scale).backward()
        model.zero_grad()
        return counter.counts

    collectives(batches)  # the first forward compares weights
    once, twice = collectives(batches[:1]), collectives(batches)
    assert once["all_reduce"] == twice["all_reduce"] == 1  # what counts
    assert once["reduce_scatter"] == twice["reduce_scatter"] > 0  # at the last micro-batch


def test_a_mean_of_each_rank_is_warned_of():
    on_ranks(2, traps)


def test_what_counts_is_given_in_any_form_and_gradients_are_reduced_once():
    on_ranks(2, counted)


def test_a_loop_that_cannot_be_right_is_refused():
    on_ranks(2, refused)
