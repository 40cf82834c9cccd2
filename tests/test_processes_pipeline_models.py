"""Models that a cut into stages must not change, on two processes: the loss, gradients, buffers and plain attributes are those of the
unsharded model on the same micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from processes import on_ranks
from small_models import whole
from staged_models import (
    IGNORED,
    LENGTH,
    ROWS,
    VOCABULARY,
    Block,
    Counts,
    Drops,
    Net,
    ReadsLabels,
    hooked,
    nll,
    told,
    wrapped,
)
from torch import Tensor, nn

import shardplan
from shardplan.proof.compare import TOLERANCE, relative_error

PLAN = {
    "version": "1",
    "name": "net",
    "tensor_parallel": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
    "data_parallel": {"units": ["blocks.*"]},
    "pipeline_parallel": {"layers": "blocks.*"},
}
MICRO_BATCHES, STEPS = 4, 2


@dataclass(frozen=True)
class Case:
    """Args:
    own: the model computes its loss.
    change: done to the model.
    """

    block: type[nn.Module] = Block
    own: bool = False
    change: Callable[[Any], object] | None = None
    schedule: str = "1f1b"
    sizes: Mapping[str, int] = field(default_factory=lambda: {"pp": 2})

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        model = Net(self.block, own=self.own).double().train()
        if self.change is not None:
            self.change(model)
        return model

    @property
    def replicas(self) -> int:
        return self.sizes.get("dp_shard", 1)

    @property
    def ranks(self) -> int:
        return self.sizes["pp"] * self.sizes.get("tp", 1) * self.replicas


def batch(step: int, replica: int) -> dict[str, Tensor]:
    """One micro-batch has no label."""
    generator = torch.Generator().manual_seed(10 * step + replica)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, IGNORED)
    labels[2:4] = IGNORED
    return {"input_ids": ids, "labels": labels}


def some_ids(seed: int) -> dict[str, Tensor]:
    return batch(seed, 0)


def tokens_of(step: int, replicas: int) -> int:
    return sum(int((batch(step, replica)["labels"] != IGNORED).sum()) for replica in range(replicas))


def staged(case: Case) -> dict[str, Any]:
    pipeline = shardplan.apply_plan(
        shardplan.Model(case.build(), inputs=some_ids),
        shardplan.build_mesh(**case.sizes),
        PLAN,
        pipeline=shardplan.PipelineOptions(case.schedule, MICRO_BATCHES, loss_fn=None if case.own else nll),
        prove=False,
    )
    for one in told:
        if isinstance(one, list):
            one.clear()  # of the runs of the reduced model
    mesh = pipeline.layout.mesh.mesh
    replica = mesh.get_local_rank("dp_shard") if case.replicas > 1 else 0
    losses, gradients = [], []
    for step in range(STEPS):
        losses.append(pipeline.step(tokens=tokens_of(step, case.replicas), **batch(step, replica)).item())
        gradients.append({name: whole(p.grad).clone() for name, p in pipeline.named_parameters() if p.grad is not None})
        pipeline.zero_grad()
    with torch.no_grad():
        losses.append(pipeline.eval().step(tokens=tokens_of(STEPS, case.replicas), **batch(STEPS, replica)).item())
    return {
        "losses": losses,
        "gradients": gradients,
        "replica": replica,
        "state": _state(pipeline.parts),
        "told": [*told],
    }


def _state(parts: list[nn.Module]) -> dict[str, Any]:
    """Buffers and plain attributes of the blocks that are there."""
    blocks = {
        name: one
        for part in parts
        for name, one in part.named_modules()
        if isinstance(one, Block) and [*one.parameters()]
    }
    found: dict[str, Any] = {f"{n}.{leaf}": b.clone() for n, one in blocks.items() for leaf, b in one.named_buffers()}
    found |= {
        f"{n}.{leaf}": vars(one)[leaf] for n, one in blocks.items() for leaf in ("calls", "seen") if leaf in vars(one)
    }
    return found


def unsharded(case: Case) -> list[dict[str, Any]]:
    """Of each data-parallel rank, which has a model of its own."""
    models = [case.build() for _ in range(case.replicas)]
    losses, gradients = [], []
    for step in range(STEPS + 1):
        total = 0.0
        for model in models:
            model.train(step < STEPS)
        for replica, model in enumerate(models):
            for part in zip(*(x.chunk(MICRO_BATCHES) for x in batch(step, replica).values()), strict=True):
                ids, labels = part
                tokens = tokens_of(step, case.replicas)
                output = model(input_ids=ids, labels=labels) if case.own else model(input_ids=ids)
                loss = nll(output.logits if case.own else output, labels) / tokens
                if step < STEPS:
                    loss.backward()
                total += loss.item()
        losses.append(total)
        if step < STEPS:
            found: dict[str, Tensor] = {}
            for model in models:
                for name, p in model.named_parameters():
                    if p.grad is not None:
                        found[name] = found.get(name, 0) + p.grad
                model.zero_grad()
            gradients.append(found)
    return [{"losses": losses, "gradients": gradients, "state": _state([model])} for model in models]


def compare(case: Case) -> None:
    expected, limit = unsharded(case), TOLERANCE[torch.float64]
    for run in on_ranks(case.ranks, staged, case):
        right = expected[run["replica"]]
        assert run["losses"] == pytest.approx(right["losses"], rel=1e-6)
        for got, wanted in zip(run["gradients"], right["gradients"], strict=True):
            for name, value in got.items():
                assert relative_error(value, wanted[name]) <= limit, (name, relative_error(value, wanted[name]))
        for name, value in run["state"].items():
            wanted = right["state"][name]
            if isinstance(value, Tensor):
                assert relative_error(value, wanted) <= limit, name
            else:
                assert value == wanted, name


CASES = {
    "labels in a block": Case(ReadsLabels, own=True),
    "counters and means": Case(Counts),
    "tokens dropped in training": Case(Drops),
    "wrapped forwards": Case(change=wrapped),
    "hooks": Case(change=hooked),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.proves("pp")
def test_models(name: str) -> None:
    compare(CASES[name])


@pytest.mark.slow
def test_what_hooks_and_forwards_collect_is_where_their_owner_looks() -> None:
    """Hooks before the model run in every stage, those after it in the last; once for each micro-batch."""
    runs, forwards = on_ranks(2, staged, CASES["hooks"]), MICRO_BATCHES * (STEPS + 1)
    seen, recorders = zip(*(run["told"] for run in runs), strict=True)
    assert seen == (["before"] * forwards, ["before", "after"] * forwards)
    assert [recorder.calls for recorder in recorders] == [forwards, 0]  # of the first block
    for run in on_ranks(2, staged, CASES["wrapped forwards"]):
        calls = run["told"][0]
        assert len(calls) == 3 * forwards and calls.count(f"1.0 {forwards}") == 1, "the model and two blocks"


def with_a_backward_hook() -> None:
    case = Case(change=lambda model: model.register_full_backward_hook(lambda *_: None))
    with pytest.raises(ValueError, match="Net has a backward hook, and no pipeline stage has both"):
        staged(case)


@pytest.mark.slow
def test_a_backward_hook_on_the_model_is_refused() -> None:
    on_ranks(2, with_a_backward_hook)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved"])
def test_other_schedules(name: str, schedule: str) -> None:
    compare(replace(CASES[name], schedule=schedule))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("axis", ["tp", "dp_shard"])
def test_two_axes(name: str, axis: str) -> None:
    compare(replace(CASES[name], sizes={"pp": 2, axis: 2}))
