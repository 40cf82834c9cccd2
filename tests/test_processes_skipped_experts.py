"""Ranks that leave out a module of experts whose tokens are exchanged: all raise, where one waited for the other; and all may leave
it out together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from small_models import whole
from torch import Tensor, nn

import shardplan
from shardplan.proof.compare import relative_error
from tests.case_models import Routed, Stack

ROWS = 16


class Branching(Routed):
    """Does not call its experts where no token is above zero."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if bool((x > 0).any()) else x + self.gate(x.flatten(0, -2)).sum() * 0


class Leaping(Stack):
    """Leaves out its first block where no token is above zero."""

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.layers
        for layer in others if not bool((x > 0).any()) else (first, *others):
            x = layer(x)
        return x


@dataclass(frozen=True)
class Case:
    """A model on a mesh.

    Args:
        sizes: of the mesh.
        skipping: the data-parallel ranks that leave experts out.
        said: by all of the ranks; "" where nothing is wrong.
        leaps: over the whole block.
        exchange: of the experts.
        options: more sections.
        trains: with gradients.
    """

    sizes: Mapping[str, int]
    skipping: tuple[int, ...]
    said: str = "layers.0.experts, and ep rank 1 does not call layers.0.experts"
    leaps: bool = False
    exchange: str = "once"
    options: Mapping[str, object] = field(default_factory=dict)
    trains: bool = True

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return Leaping([Routed(), Routed()]) if self.leaps else Stack([Branching(), Branching()])

    def batch(self, rank: int) -> Tensor:
        x = torch.randn(2, ROWS // 2, 16, generator=torch.Generator().manual_seed(rank)).abs()
        return -x if rank in self.skipping else x


DP = {"dp_shard": 2, "ep": 2}
CASES = {
    "one rank": Case(DP, (1,)),
    "the first rank": Case(DP, (0,), "ep rank 0 does not call layers.0.experts, and ep rank 1 calls"),
    "every pair is sent": Case(DP, (1,), exchange="pairs"),
    "without gradients": Case(DP, (1,), trains=False),
    "checkpointed": Case(DP, (1,), options={"activation_checkpointing": {"modules": ["layers.*"]}}),
    "a whole block": Case(DP, (1,), "layers.0.experts, and ep rank 1 calls layers.1.experts", leaps=True),
    "all ranks": Case(DP, (0, 1), ""),
    "all ranks, checkpointed": Case(DP, (0, 1), "", options={"activation_checkpointing": {"modules": ["layers.*"]}}),
    "nobody": Case(DP, (), ""),
}
FOUR = {
    "two ranks of other groups": Case(
        {"dp_shard": 4, "ep": 2}, (0, 3), "does not call layers.0.experts"
    ),  # each waits for a rank of the other group to gather the parameters
    "tp inside of ep": Case({"dp_shard": 2, "tp": 2, "ep": 4}, (1,), "ep ranks 2 and 3 do not call layers.0.experts"),
    "all ranks": Case({"dp_shard": 4, "ep": 2}, (0, 1, 2, 3), ""),
}


def steps(cases: dict[str, Case]) -> dict[str, str | tuple[int, dict[str, Tensor]]]:
    """What was raised, or this rank's batch and the gradients of its step."""
    found: dict[str, str | tuple[int, dict[str, Tensor]]] = {}
    for name, case in cases.items():
        model, mesh = case.build(), shardplan.build_mesh(**case.sizes)
        rules = {"layers.*.experts": {"style": "ep_dispatch", "exchange": case.exchange}}
        plan = {"version": "1", "name": "mine", "expert_parallel": rules, "data_parallel": {"units": ["layers.*"]}}
        shardplan.apply_plan(shardplan.Model(model, inputs=inputs), mesh, {**plan, **case.options}, prove=False)
        own = mesh.get_local_rank("dp_shard")
        try:
            with torch.set_grad_enabled(case.trains):
                loss = model(case.batch(own)).square().mean()
        except RuntimeError as error:
            found[name] = str(error)
        else:
            loss.backward()
            found[name] = own, {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        dist.barrier()
    return found


def inputs(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(2, ROWS // 2, 16, generator=torch.Generator().manual_seed(seed))}


def check(ranks: int, cases: dict[str, Case]) -> None:
    results = on_ranks(ranks, steps, cases, seconds=120)
    for name, case in cases.items():
        for result in (one[name] for one in results):
            if case.said:
                assert isinstance(result, str) and case.said in result, (name, result)
                assert "experts(x[:0], ids[:0], weights[:0])" in result, name
                continue
            assert not isinstance(result, str), (name, result)
            model, shares = case.build(), case.sizes["dp_shard"]
            for rank in range(shares):
                (model(case.batch(rank)).square().mean() / shares).backward()
            for parameter, gradient in result[1].items():
                expected = model.get_parameter(parameter).grad
                assert expected is not None or not gradient.any(), (name, parameter)
                assert expected is None or relative_error(gradient, expected) <= 1e-5, (name, parameter)


@pytest.mark.slow
def test_a_module_of_experts_that_some_rank_does_not_call() -> None:
    check(2, CASES)


@pytest.mark.slow
def test_on_four_ranks() -> None:
    check(4, FOUR)
