"""Findings about blocks of nn.Sequential name the children that they are about: `layers.*.3`, not `layers.*.*`."""

from __future__ import annotations

import re

import pytest
from torch import nn

import shardplan


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)
        )
        self.head = nn.Linear(32, 96)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"layers.*.1": "colwise"}, ("SP350", "no rule names layers.*.3,", "write `layers.*.3: replicate`")),
        (
            {"layers.*.1": "rowwise"},
            (
                "SP402",
                "the input of layers.*.1 is whole",
                "write `layers.*.1: colwise` instead of `rowwise`, and add `layers.*.3: rowwise`",
            ),
        ),
        ({"layers.*.*": "colwise"}, ("SP310", "layers.*.0 is a norm (LayerNorm)", "colwise_norm")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_children_of_sequential_blocks_are_named(rules: dict[str, str], expected: tuple[str, str, str]) -> None:
    plan = {"version": "1", "name": "stack", "models": ["Stack"], "tensor_parallel": rules}
    report = shardplan.validate(Stack(), plan, {"tp": 2})
    code, said, help = expected
    finding = next(one for one in report.diagnostics if one.code == code)
    assert said in finding.message and help in (finding.help or "")
    others = [one.message + (one.help or "") for one in report.diagnostics]
    assert not any(re.search(r"layers\.\*\.\*", text) for text in others)
