"""Random operations in a model's own code are refused under tensor parallelism, with the line; those that change nothing are
not."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from random import random as drawn

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardplan
from shardplan.core.diagnostics import PlanError
from tests.own_models import Decoder

PLAN = {"version": "1", "name": "mine", "tensor_parallel": {"layers.*.up": "colwise", "layers.*.down": "rowwise"}}
Noise = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    """An MLP whose result goes through something."""

    def __init__(self, noise: Noise) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        return x + self.noise(self, self.down(torch.relu(self.up(x))))


def model(noise: Noise) -> nn.Module:
    return Decoder(partial(Block, noise))


ACTS: dict[str, Noise] = {
    "dropout": lambda m, y: F.dropout(y, 0.2, m.training),
    "randn_like": lambda m, y: y + 0.01 * torch.randn_like(y),
    "bernoulli": lambda m, y: y * torch.bernoulli(torch.full((y.shape[0], 1, 1), 0.5)),
    "rand": lambda m, y: y * torch.rand(y.shape[1], 1),
    "multinomial": lambda m, y: y[:, torch.multinomial(torch.ones(y.shape[1]), y.shape[1])],
    "gumbel": lambda m, y: y * F.gumbel_softmax(y),
    "init": lambda m, y: y + nn.init.trunc_normal_(torch.empty_like(y), std=0.01),
    "sdpa": lambda m, y: F.scaled_dot_product_attention(y, y, y, dropout_p=0.1 if m.training else 0.0),
    "rare": lambda m, y: y if torch.rand([]) < 0.999 else 0 * y,
    "rare bernoulli": lambda m, y: 0 * y if torch.bernoulli(torch.tensor(0.01)) else y,
    "rare integer": lambda m, y: 0 * y if torch.randint(100, ()) == 99 else y,
    "rare middle integer": lambda m, y: 0 * y if torch.randint(90, ()) == 44 else y,
    "rare among many": lambda m, y: 0 * y if torch.randint(5000, ()) == 2222 else y,
    "rare normal": lambda m, y: 0 * y if torch.randn(()) > 2.5 else y,
    "rare in place": lambda m, y: y if torch.empty(1).uniform_(0, 10) < 9.999 else 0 * y,
}
OTHERS: dict[str, Noise] = {
    "python": lambda m, y: y * (1 + random.random()),
    "numpy": lambda m, y: y * float(np.random.rand()),
    "rare python": lambda m, y: 0 * y if drawn() > 0.999 else y,
    "rare python integer": lambda m, y: 0 * y if random.randint(1, 1000) == 1000 else y,
    "rare python choice": lambda m, y: 0 * y if random.choice(range(50)) == 1 else y,
    "rare python middle": lambda m, y: 0 * y if random.randint(1, 50) == 25 else y,
    "rare python among many": lambda m, y: 0 * y if random.randrange(10**6) == 777 else y,
    "rare python sample": lambda m, y: 0 * y if 700 in random.sample(range(1000), 5) else y,
    "rare numpy middle": lambda m, y: 0 * y if np.random.choice(50) == 25 else y,
    "rare numpy": lambda m, y: 0 * y if np.random.rand() < 0.001 else y,
    "rare python normal": lambda m, y: 0 * y if random.gauss(0, 1) > 5 else y,
}
IDLE: dict[str, Noise] = {
    "no probability": lambda m, y: F.dropout(y, 0.0, m.training),
    "not in training": lambda m, y: F.dropout(y, 0.2, False),
    "layer drop of 0": lambda m, y: y if m.training and torch.rand([]) >= 0.0 else 0 * y,
    "integer of 0": lambda m, y: 0 * y if torch.randint(9, ()) > 8 else y,
    "python integer of 0": lambda m, y: 0 * y if random.randint(1, 9) > 9 else y,
    "unused": lambda m, y: (torch.randn_like(y), y)[1],
    "attention": lambda m, y: F.scaled_dot_product_attention(y, y, y, dropout_p=0.0),
}


@pytest.mark.parametrize(("name", "training"), [*((name, True) for name in ACTS), ("dropout", False), ("sdpa", False)])
def test_what_acts_is_refused_with_its_line(name: str, training: bool) -> None:
    report = shardplan.validate(model(ACTS[name]).train(training), PLAN, {"tp": 2})
    assert [d.code for d in report.diagnostics] == ["SP371"]
    found = report.diagnostics[0]
    assert found.modules == ("layers.0", "layers.1")
    assert f"test_layout_randomness.py:{ACTS[name].__code__.co_firstlineno}: " in found.notes[0]


@pytest.mark.parametrize("name", OTHERS)
def test_other_generators_are_seen_at_their_module(name: str) -> None:
    before = random.getstate()
    report = shardplan.validate(model(OTHERS[name]), PLAN, {"tp": 2})
    assert [d.code for d in report.diagnostics] == ["SP371"]
    assert report.diagnostics[0].modules == ("layers.0", "layers.1")
    assert (random.getstate() == before) == ("numpy" in name)  # the recorded run is the model's own


@pytest.mark.parametrize("name", IDLE)
def test_what_changes_nothing_is_not(name: str) -> None:
    assert shardplan.validate(model(IDLE[name]), PLAN, {"tp": 2}).diagnostics == ()


def test_the_one_that_acts_is_named_among_those_that_do_not() -> None:
    def noise(module: nn.Module, y: Tensor) -> Tensor:
        idle = torch.rand([]) < 0.0
        return 0 * y if idle else F.dropout(y, 0.5, module.training)

    found = shardplan.validate(model(noise), PLAN, {"tp": 2}).diagnostics[0]
    assert len(found.notes) == 1 and "F.dropout" in found.notes[0]


def test_without_tp_nothing_is_said() -> None:
    assert shardplan.validate(model(ACTS["dropout"]), PLAN, {"tp": 1}).diagnostics == ()


def test_init_says_so_too() -> None:
    with pytest.raises(PlanError) as raised:
        shardplan.init_plan(model(ACTS["randn_like"]))
    assert [d.code for d in raised.value.diagnostics] == ["SP371"]


def test_transformers_layer_drop_of_0_is_not_refused() -> None:
    """OPT draws a number for each layer, whatever the probability."""
    report = shardplan.validate(
        shardplan.Model("opt", settings={"dropout": 0.0, "num_hidden_layers": 2}), "auto", {"tp": 2}
    )
    assert "SP371" not in {d.code for d in report.diagnostics} and report.ok
