"""Norms over features that are split (`colwise_norm`): their own code runs, with the means over all ranks' features."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import Olmo2Config

import shardplan
from shardplan import compile_plan, validate, verify
from shardplan.compiler.lower.expected_collectives import expected_collectives
from shardplan.core.module_program import FeatureMeans
from shardplan.torchlib.rms_norms import rms_norm

HIDDEN = 32
RULES = {
    "embed": "embedding_rowwise",
    "block.up": "colwise",
    "block.norm": "colwise_norm",
    "block.down": "rowwise",
}


class Own(nn.Module):
    """An RMS norm as models write it.

    Args:
        named: whether the arguments of its mean are.
    """

    def __init__(self, width: int, named: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.named = named

    def forward(self, x: Tensor) -> Tensor:
        square = x.float().pow(2)
        mean = torch.mean(input=square, dim=x.ndim - 1, keepdim=True) if self.named else square.mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(mean + 1e-6))


class Grouped(Own):
    """The means are over groups of features; one rank has all of a group."""

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, 12))
        return self.weight * (groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + 1e-6)).flatten(-2)


class Block(nn.Module):
    def __init__(self, norm: nn.Module, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, width, bias=False), nn.Linear(width, HIDDEN, bias=False)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(self.up(x)))


class Model(nn.Module):
    def __init__(self, norm: nn.Module, width: int):
        super().__init__()
        self.embed = nn.Embedding(16, HIDDEN)
        self.block = Block(norm, width)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.block(self.embed(input_ids)).log_softmax(-1)


def inputs(model: nn.Module) -> dict[str, Tensor]:
    return {"input_ids": torch.arange(12).view(2, 6)}


def subject(norm, width: int = 48) -> dict:
    torch.manual_seed(0)
    plan = {"version": "1", "name": "case", "tensor_parallel": RULES}
    model = shardplan.Model(Model(norm(width), width), inputs=inputs)
    return {"model": model, "plan": plan, "sequence_parallel": False}


@pytest.mark.parametrize("named", [False, True])
def test_the_mean_is_over_all_ranks(named: bool) -> None:
    for tp in (2, 4):
        report = verify(mesh={"tp": tp}, **subject(lambda width: Own(width, named)))
        assert report.ok, report


@pytest.mark.parametrize("tp", [2, 4])
def test_means_over_groups_of_features_are_a_ranks_own(tp: int) -> None:
    """Also where a rank has one group, whose mean is as long as its features (tp 4)."""
    assert validate(mesh={"tp": tp}, **subject(Grouped)).ok
    report = verify(mesh={"tp": tp}, **subject(Grouped))
    assert report.ok, report


def test_torchs_rms_norm_is_taken_apart() -> None:
    report = verify(mesh={"tp": 2}, **subject(nn.RMSNorm))
    assert report.ok, report


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("eps", [None, 1e-2])
@pytest.mark.parametrize("weighted", [True, False])
def test_its_steps_are_torchs(dtype: torch.dtype, eps: float | None, weighted: bool) -> None:
    torch.manual_seed(0)
    x, weight = (0.01 * torch.randn(3, 5, 16)).to(dtype), torch.randn(16).to(dtype) if weighted else None
    found = rms_norm(lambda squares: squares.mean(-1, keepdim=True), x, (16,), weight, eps)
    torch.testing.assert_close(found, torch.rms_norm(x, (16,), weight, eps))


def test_a_norm_whose_means_are_not_seen_is_refused() -> None:
    """torch's layer norm, which takes its means inside one operator and knows the width."""
    report = validate(mesh={"tp": 2}, **subject(nn.LayerNorm))
    assert next(d.code for d in report.diagnostics) == "SP408", report


def test_without_it_the_norm_is_refused_with_the_rule_that_is_missing() -> None:
    """What OLMo 2 needs, whose norms of queries and keys are over all heads."""
    config = Olmo2Config(num_hidden_layers=2)
    rules = {"model.layers.*.self_attn.{q,k}_norm": "none"}
    plan = {"version": "1", "name": "mine", "extends": "olmo2", "tensor_parallel": rules}
    report = validate(config, plan, {"tp": 2}, sequence_parallel=False)
    assert not report.ok
    assert [d.help for d in report.diagnostics] == ["add `model.layers.*.self_attn.{q,k}_norm: colwise_norm`"], report


def test_whole_features_are_refused() -> None:
    """A norm in front of the block has all of them."""
    config = Olmo2Config(num_hidden_layers=2)
    rules = {"model.layers.*.post_attention_layernorm": "colwise_norm"}
    plan = {"version": "1", "name": "mine", "extends": "olmo2", "tensor_parallel": rules}
    report = validate(config, plan, {"tp": 2}, sequence_parallel=False)
    assert "SP402" in {d.code for d in report.diagnostics}, report


def test_its_collectives_are_expected_and_shown() -> None:
    program = compile_plan(Olmo2Config(num_hidden_layers=1), {"tp": 2}, "olmo2", sequence_parallel=False)
    name = "model.layers.0.self_attn.q_norm"
    assert program.modules[name].means == FeatureMeans(Olmo2Config().hidden_size, 2)
    assert expected_collectives({name: program.modules[name]}) == {
        "forward": {"all_reduce": 1},
        "backward": {"all_reduce": 1},
    }
    assert f"means over all {Olmo2Config().hidden_size} features: P -> R" in program.describe()
