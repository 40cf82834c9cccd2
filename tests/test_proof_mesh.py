"""The proof runs on ranks of every axis that is asked for: experts that are distributed over data-parallel ranks get tokens of
other batches, and what a model does with all rows of an expert at once is seen there."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from proofs import fake_mesh
from torch import Tensor, nn
from torch.nn import functional as F

import shardplan
from tests.case_models import Experts, Routed, Stack, sequences

PLAN = {
    "version": "1",
    "name": "mixture",
    "expert_parallel": {"layers.*.experts": "ep_dispatch"},
    "data_parallel": {"units": ["layers.*"]},
}
OVER_DP = {"dp_shard": 2, "ep": 2, "tp": 1}
ABOVE_TP = {"dp_shard": 2, "ep": 4, "tp": 2}
BESIDE_TP = {"dp_shard": 2, "ep": 2, "tp": 2}
BELOW_TP = {"ep": 2, "tp": 4}  # two ranks have the same experts, and FSDP2 adds up their gradients


def hooked(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def through(x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(change)
        return x

    return through


class Changing(Experts):
    """Something is done to the rows of each expert."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            token, slot = torch.where(ids == expert)
            rows = self.change(torch.relu(tokens[token] @ self.up[expert].T))
            result = result.index_add(0, token, rows @ self.down[expert].T * weights[token, slot].unsqueeze(1))
        return result


class Running(Experts):
    """Keeps a mean of the tokens that it got."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if len(tokens):
            self.mean.lerp_(tokens.detach().mean(0), 0.5)
        return super().forward(tokens, ids, weights)


class Block(Routed):
    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.experts = experts


class Balancing(Block):
    """Its router asks experts less that got many of its tokens before."""

    def __init__(self, experts: Experts) -> None:
        super().__init__(experts)
        self.register_buffer("load", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weights, ids = (self.gate(rows) - self.load).softmax(-1).topk(2)
        self.load.add_(0.1 * F.one_hot(ids, 8).sum((0, 1)))
        return x + self.experts(rows, ids, weights).view_as(x)


def normalised(gradient: Tensor) -> Tensor:
    return gradient / (gradient.norm() + 1e-3)


def clipped(gradient: Tensor) -> Tensor:
    return gradient * (1e-3 / (gradient.norm() + 1e-9)).clamp(max=1)


def centred(gradient: Tensor) -> Tensor:
    return gradient - gradient.mean(0)


def of_each_row(gradient: Tensor) -> Tensor:
    return gradient / (gradient.norm(dim=-1, keepdim=True) + 1e-3)


def blocks(change: Callable[[Tensor], Tensor] | None = None, kind: type[Block] = Block) -> nn.Module:
    torch.manual_seed(0)
    made = (Experts() if change is None else Changing(hooked(change)) for _ in range(2))
    return Stack([kind(experts) for experts in made])


def running() -> nn.Module:
    torch.manual_seed(0)
    return Stack([Block(Running()), Block(Running())])


def looked_at(model: nn.Module, mesh: Mapping[str, int]) -> shardplan.Report:
    return shardplan.validate(shardplan.Model(model, inputs=sequences), PLAN, mesh)


MESHES = pytest.mark.parametrize("mesh", [OVER_DP, ABOVE_TP], ids=["over_dp", "above_tp"])


@MESHES
@pytest.mark.parametrize("change", [normalised, clipped, centred])
def test_gradients_that_are_changed_over_the_rows_of_an_expert_differ(
    change: Callable[[Tensor], Tensor], mesh: Mapping[str, int]
) -> None:
    report = looked_at(blocks(change), mesh)
    assert [d.code for d in report.errors] == ["SP420"] and report.proof is not None
    assert {row.kind for row in report.proof.rows if row.verdict == "differs"} == {"gradient"}


@MESHES
def test_running_means_of_the_tokens_of_experts_differ(mesh: Mapping[str, int]) -> None:
    report = looked_at(running(), mesh)
    assert [d.code for d in report.errors] == ["SP420"] and report.proof is not None
    assert {row.name for row in report.proof.rows if row.verdict == "differs"} == {
        f"layers.{i}.experts.mean" for i in (0, 1)
    }


@pytest.mark.parametrize(
    "mesh", [OVER_DP, ABOVE_TP, BESIDE_TP, BELOW_TP], ids=["over_dp", "above_tp", "beside_tp", "below_tp"]
)
def test_what_each_rank_does_with_its_own_rows_is_right(mesh: Mapping[str, int]) -> None:
    for model in (blocks(), blocks(of_each_row), blocks(kind=Balancing)):
        assert looked_at(model, mesh).proven


def test_apply_plan_proves_experts_without_tp() -> None:
    with fake_mesh(2, names=("dp_shard",)) as mesh, pytest.raises(shardplan.PlanError, match="SP420"):
        shardplan.apply_plan(shardplan.Model(blocks(centred), inputs=sequences), mesh, PLAN, ep=2)
