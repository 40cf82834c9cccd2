"""Where a sequence-parallel region begins and ends, and sums inside of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput, ModelOutput

from shardplan import Model, validate


class Block(nn.Module):
    """Adds up two matrices, and normalises the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16, bias=False)) for _ in "ab"
        )
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.one(x) + self.other(x))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Pooled(nn.Module):
    """What is after the encoder reads one token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.encoder, self.pooler = nn.Linear(16, 16), Encoder(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.pooler(self.encoder(self.first(x))[:, 0])


PLAN: dict[str, Any] = {
    "version": "1",
    "tensor_parallel": {
        "encoder.layers.*": "input_with_grad_allreduce",
        "encoder.layers.*.{one,other}.0": "colwise",
        "encoder.layers.*.{one,other}.2": "rowwise",
    },
    "sequence_parallel": {
        "encoder": {"style": "split_seq_input", "output": "gather"},
        "encoder.layers.*": "gather_seq_input",
        "encoder.layers.*.{one,other}.2": "local_params",
        "encoder.layers.*.{one,other}.2.weight": "rowwise",
        "encoder.layers.*.norm": "reduce_seq_input",
        "encoder.layers.*.norm.{weight,bias}": "replicated_with_grad_allreduce",
    },
}


def inputs(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(seed))}


@pytest.mark.parametrize("tp", [2, 4])
def test_a_module_splits_the_sequence_and_gathers_it_and_a_norm_reduces_a_sum(tp: int) -> None:
    report = validate(Model(Pooled(), inputs=inputs), PLAN, {"tp": tp}, sequence_parallel=True)
    assert report.ok and report.proven, report


def test_a_norm_reduces_a_sum_without_the_sequence_split() -> None:
    """Once, where two matrices would each; a norm that leaves it a partial sum is a finding."""
    rules = {
        **PLAN["tensor_parallel"],
        "encoder.layers.*.{one,other}.2": "local_params",
        "encoder.layers.*.{one,other}.2.weight": "rowwise",
    }
    reduced = {**PLAN, "tensor_parallel": {**rules, "encoder.layers.*.norm": "reduce_input"}}
    report = validate(Model(Pooled(), inputs=inputs), reduced, {"tp": 2}, sequence_parallel=False)
    assert report.ok and report.proven, report
    report = validate(
        Model(Pooled(), inputs=inputs), {**PLAN, "tensor_parallel": rules}, {"tp": 2}, sequence_parallel=False
    )
    assert not report.ok


def test_the_exit_of_the_region_is_missed() -> None:
    plan = {**PLAN, "sequence_parallel": {**PLAN["sequence_parallel"], "encoder": "split_seq_input"}}
    report = validate(Model(Pooled(), inputs=inputs), plan, {"tp": 2}, sequence_parallel=True)
    assert "SP405" in {one.code for one in report.errors}


def test_a_whole_value_is_no_sum() -> None:
    rules = {**PLAN["sequence_parallel"], "encoder.layers.*.{one,other}.2": "rowwise"}
    del rules["encoder.layers.*.{one,other}.2.weight"]
    report = validate(
        Model(Pooled(), inputs=inputs), {**PLAN, "sequence_parallel": rules}, {"tp": 2}, sequence_parallel=True
    )
    assert "SP402" in {one.code for one in report.errors}


class InOneRow(nn.Module):
    """Returns its tokens in one row, as Llama 4's experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x.reshape(-1, 16))))


class Viewed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.entrance, self.block, self.norm = nn.Linear(16, 16), nn.Tanh(), InOneRow(), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entrance(self.first(x))
        return self.norm(x + self.block(x).view(x.shape))


@pytest.mark.parametrize("tp", [2, 4])
def test_an_output_in_one_row_is_split_as_its_argument_is(tp: int) -> None:
    plan = {
        "version": "1",
        "tensor_parallel": {
            "block": {"style": "input_with_grad_allreduce", "output": "all_reduce"},
            "block.up.weight": "colwise",
            "block.down.weight": "rowwise",
        },
        "sequence_parallel": {
            "entrance": "split_seq_input",
            "block": {"style": "gather_seq_input", "output": "reduce_scatter"},
            "norm": {"style": "sequence_parallel", "output": "gather"},
        },
    }
    report = validate(Model(Viewed(), inputs=inputs), plan, {"tp": tp}, sequence_parallel=True)
    assert report.ok and report.proven, report


class Stack(nn.Module):
    """Returns what each of its layers read too, as transformers' encoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.entrance, self.layers = nn.Identity(), nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> ModelOutput:
        states = (x := self.entrance(x),)
        for layer in self.layers:
            states = (*states, x := x + layer(x))
        return BaseModelOutput(last_hidden_state=x, hidden_states=states)


class OfStates(nn.Module):
    """What is after the encoder reads its hidden states, not its first output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.encoder, self.pooler = nn.Linear(16, 16), Stack(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.pooler(self.encoder(self.first(x)).hidden_states[-1])


def test_code_of_a_model_reads_hidden_states_as_its_layers_return_them() -> None:
    """DeBERTa's does: gathered when the encoder returned them, they were gathered once more in front of the head."""
    rules = {name: rule for name, rule in PLAN["sequence_parallel"].items() if name != "encoder"}
    rules |= {"encoder.entrance": "split_seq_input", "pooler": {"style": "gather_seq_input", "grad": "complete"}}
    split = {**PLAN, "sequence_parallel": rules}
    report = validate(Model(OfStates(), inputs=inputs), split, {"tp": 2}, sequence_parallel=True)
    assert report.ok and report.proven, report
