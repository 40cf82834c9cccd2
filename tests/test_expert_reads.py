"""Stacks of experts that other code than their module's reads: one finding, whatever tp is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardplan
from tests.case_models import Experts, ReadingRouted, Routed, Stack, sequences

PLAN = {
    "version": "1",
    "name": "mine",
    "expert_parallel": {"layers.*.experts": "ep_dispatch"},
    "data_parallel": {"units": ["layers.*"]},
}


class Router(nn.Module):
    def __init__(self, experts: Experts):
        super().__init__()
        self.weight, self.experts = nn.Parameter(torch.randn(8, 16)), [experts]

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ self.weight.T + self.experts[0].down.mean((1, 2))


class RoutedByThem(Routed):
    """Its router reads the experts' parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Router(self.experts)


class WithoutGradient(Routed):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.experts.up.detach().mean()


class ByShape(Routed):
    """What it reads needs no values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.experts.up.shape[0]


def codes(kind: Callable[[], nn.Module], tp: int) -> list[tuple[str, str, tuple[str, ...]]]:
    torch.manual_seed(0)
    mesh = {"tp": tp, "dp_shard": 2, "ep": 2}
    report = shardplan.validate(shardplan.Model(Stack([kind(), kind()]), inputs=sequences), PLAN, mesh)
    return [(d.code, d.message, d.notes) for d in report.diagnostics]


@pytest.mark.parametrize("kind", [ReadingRouted, RoutedByThem, WithoutGradient])
def test_a_stack_that_is_read_outside_is_the_same_finding_at_every_tp(kind: Callable[[], nn.Module]) -> None:
    found = codes(kind, 1)
    assert [code for code, *_ in found] == ["SP410"]
    assert found == codes(kind, 2)


@pytest.mark.parametrize("kind", [Routed, ByShape])
def test_others_are_right(kind: Callable[[], nn.Module]) -> None:
    assert not codes(kind, 1) and not codes(kind, 2)
