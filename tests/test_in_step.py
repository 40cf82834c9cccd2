"""A rank whose code skips operations that the unsharded model runs: those that follow are compared with their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardplan
from shardplan.compiler.layout.spreads import InStep
from shardplan.model.reduced.trace import Event, Trace


def trace(*names: str) -> Trace:
    run = Trace(events=[Event("op", name, ("m", 1, position)) for position, name in enumerate(names)])
    run.at = {event.place: event for event in run.events}
    return run


def test_places_after_skipped_operations() -> None:
    steps = InStep(trace("view", "repeat", "repeat", "t", "t", "t", "add"), trace("view", "t", "t", "t", "add"))
    assert [steps.place(("m", 1, i)) for i in range(5)] == [("m", 1, i) for i in (0, 3, 4, 5, 6)]
    assert steps.place(("m", 1, "4.0")) == ("m", 1, "6.0")
    assert steps.place(("m", 1, "5.out")) == ("m", 1, "7.out")  # what is read after the last one
    assert steps.place(("m", 1, "in")) == ("m", 1, "in") and steps.place(("other", 1, 3)) == ("other", 1, 3)


def test_an_operation_of_the_rank_alone_has_no_place() -> None:
    steps = InStep(trace("view", "add"), trace("view", "repeat", "add"))
    assert steps.place(("m", 1, 1)) is None and steps.place(("m", 1, 2)) == ("m", 1, 1)


def test_a_run_that_stops_early_is_in_step() -> None:
    steps = InStep(trace("view", "add", "mul"), trace("view", "add"))
    assert steps.place(("m", 1, 1)) == ("m", 1, 1)


class SharedKeys(nn.Module):
    """Two key heads for four value heads; a rank of four has one of each, and repeats nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.num_heads = 8, 4
        self.k_proj, self.q_proj, self.o_proj = nn.Linear(32, 16), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, hidden_states: Tensor) -> Tensor:
        q, k = (x.unflatten(-1, (-1, self.head_dim)) for x in (self.q_proj(hidden_states), self.k_proj(hidden_states)))
        if k.shape[2] != q.shape[2]:
            k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
        k, q = (x.transpose(1, 2) for x in (k, q))
        scores = q @ k.transpose(-1, -2)
        return self.o_proj((scores @ q).transpose(1, 2).flatten(2))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SharedKeys() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("keys", ["colwise", "replicate"])
def test_keys_that_are_not_repeated_on_a_rank(keys: str) -> None:
    """One key head on two ranks each. Whole keys would be as many heads as a rank has no queries for."""
    plan = {
        "version": "1",
        "tensor_parallel": {
            "layers.*": "input_with_grad_allreduce",
            "layers.*.q_proj": "colwise",
            "layers.*.k_proj": keys,
            "layers.*.o_proj": "rowwise",
        },
    }
    report = shardplan.validate(
        shardplan.Model(Attending(), inputs=lambda seed: {"x": torch.randn(2, 4, 32)}), plan, {"tp": 4}
    )
    assert report.ok is (keys == "colwise"), report.diagnostics
