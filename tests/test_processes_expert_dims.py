"""Experts whose code takes [batch, sequence, hidden], distributed: as the unsharded model, on every mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from case_models import Experts
from processes import on_ranks
from small_models import share_of, whole
from torch import Tensor, nn

import shardplan
from shardplan.proof.compare import TOLERANCE, relative_error


class Experts3D(Experts):
    def forward(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        batch, length, hidden = tokens.shape
        rows = (x.reshape(batch * length, -1) for x in (tokens, ids, weights))
        return super().forward(*rows).view(batch, length, hidden)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 8, bias=False), Experts3D()

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2)
        return x + self.experts(x, ids, weights)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def inputs(number: int = 0) -> dict[str, Tensor]:
    return {"x": torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(number))}


def plan(exchange: str) -> dict[str, Any]:
    return {
        "version": "1",
        "name": "mine",
        "sequence_parallel": {
            "layers.0": "split_seq_input",
            "norm": {"style": "sequence_parallel", "output": "gather"},
        },
        "expert_parallel": {
            "layers.*.experts": {"style": "ep_dispatch", "exchange": exchange},
            "layers.*.gate": "token_wise",
        },
        "data_parallel": {"units": ["layers.*"]},
    }


def step(of: nn.Module, number: int) -> Tensor:
    result = of(**inputs(number))
    (result * torch.linspace(-1, 1, 16)).mean().backward()
    return result.detach()


def equal(sizes: dict[str, int], exchange: str, sequence_parallel: bool) -> None:
    mesh, sharded, reference = shardplan.build_mesh(**sizes), model(), model()
    given = shardplan.Model(sharded, inputs=inputs)
    shardplan.apply_plan(given, mesh, plan(exchange), sequence_parallel=sequence_parallel)
    own, ranks = share_of(mesh)
    result, expected = step(sharded, own), [step(reference, number) for number in range(ranks)]
    assert relative_error(whole(result), expected[own]) <= TOLERANCE[torch.float32]
    for (name, p), (_, q) in zip(sharded.named_parameters(), reference.named_parameters(), strict=True):
        error = relative_error(whole(p.grad), q.grad / ranks)
        assert error <= TOLERANCE[torch.float32], (sizes, name, error)


@pytest.mark.parametrize("exchange", ["once", "pairs"])
def test_each_rank_is_right(exchange: str) -> None:
    for sizes, sequence_parallel in (
        ({"tp": 2, "ep": 2}, True),
        ({"tp": 2, "ep": 2}, False),
        ({"dp_shard": 2, "ep": 2}, False),
    ):
        on_ranks(2, equal, sizes, exchange, sequence_parallel)
