"""PLAN `auto` with several ep ranks, for a model that no built-in plan is for: the derived plan distributes the experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from own_models import WIDTH, Stack, tokens
from processes import on_ranks
from small_models import whole
from torch import Tensor, nn

import shardplan
from shardplan.cli.main import main
from shardplan.language import parse_text
from shardplan.proof.compare import TOLERANCE, relative_error

EXPERTS, EACH = 4, 2


class Experts(nn.Module):
    """Nothing of it depends on values, so that its cost can be estimated."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, 4 * WIDTH, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 4 * WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for expert in range(self.num_experts):
            inside = torch.relu(nn.functional.linear(x, self.up[expert]))
            share = (weights * (ids == expert)).sum(-1, keepdim=True)
            result = result + share * nn.functional.linear(inside, self.down[expert])
        return result


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weights, ids = self.router(rows).softmax(-1).topk(EACH, dim=-1)
        return self.experts(rows, ids, weights).view_as(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.sparse = nn.LayerNorm(WIDTH), Sparse()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.sparse(self.norm(x))


class Own(Stack):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(Block)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where plans are kept, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "shardplan" / "derived"


def test_a_model_of_ones_own(folder: Path) -> None:
    report = shardplan.validate(shardplan.Model(Own(), inputs=tokens), "auto", {"tp": 2, "ep": 2})
    assert report.ok and report.proven and report.derived is not None, report
    assert report.variants == ("tensor_parallel", "expert_parallel")
    assert "distributes the experts over ep ranks" in report.derived.description
    assert "expert_parallel=True" in report.derived.save
    plan = parse_text(report.derived.text).plan
    assert plan is not None and {rule.pattern: rule.style for rule in plan.expert_parallel if rule.style != "none"} == {
        "layers.*.sparse.experts": "ep_dispatch",
        "layers.*.sparse.router": "token_wise",
    }
    found = shardplan.verify(shardplan.Model(Own(), inputs=tokens), "auto", {"tp": 2, "ep": 2})
    assert found.proven and "expert_parallel" in found.variants
    assert len(list(folder.iterdir())) == 1
    shardplan.validate(shardplan.Model(Own(), inputs=tokens), "auto", {"tp": 2}, layouts=False)
    assert len(list(folder.iterdir())) == 2  # without the axis, a plan without the section


def test_a_model_without_experts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "vit", "auto", "--tp", "2", "--ep", "2", "--set", "num_hidden_layers=2"]) == 1
    assert "SP533" in capsys.readouterr().out


@pytest.mark.slow
def test_estimates_of_one() -> None:
    step = shardplan.TrainingStep(seq_len=8)
    model = shardplan.Model(Own(), inputs=tokens)
    held = {ep: shardplan.estimate(model, "auto", {"dp_shard": 4, "ep": ep}, step).held for ep in (1, 2)}
    assert held[1] == held[2]  # what ep distributes, dp_shard shards else


def largest_error(sizes: dict[str, int], ep: int) -> float:
    """Of the gradients of a step of the model that `auto` sharded, against the unsharded one on all batches."""
    unsharded, model = Own(), Own()
    mesh = shardplan.build_mesh(**sizes, ep=ep)
    shardplan.apply_plan(shardplan.Model(model, inputs=tokens), mesh, "auto", prove=False)
    for seed in range(sizes["dp_shard"]):
        (unsharded(**tokens(seed))["loss"] / sizes["dp_shard"]).backward()
    model(**tokens(mesh["dp_shard"].get_local_rank()))["loss"].backward()
    expected = {name: p.grad for name, p in unsharded.named_parameters()}
    return max(relative_error(whole(p.grad), expected[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize(
    ("ranks", "sizes", "ep"),
    [
        (2, {"dp_shard": 2, "tp": 1}, 2),
        pytest.param(2, {"dp_shard": 1, "tp": 2}, 2, marks=pytest.mark.slow),
        pytest.param(4, {"dp_shard": 2, "tp": 2}, 4, marks=pytest.mark.slow),
    ],
)
def test_on_ranks(ranks: int, sizes: dict[str, Any], ep: int) -> None:
    assert max(on_ranks(ranks, largest_error, sizes, ep)) <= TOLERANCE[torch.float32]
