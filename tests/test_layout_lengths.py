"""The sizes of the tp axis that a report lists for a model of one's own: those that divide what its code splits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardplan
from shardplan.report.text import report_text

RULES = {"h.*.{q,k,v}": "colwise", "h.*.o": "rowwise"}
PLAN = {"version": "1", "name": "mine", "tensor_parallel": RULES}


class Attention(nn.Module):
    """Attention with fewer key-value heads, whose sizes nothing but its code tells."""

    def __init__(self, heads: int, pairs: int) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(64, 8 * heads), nn.Linear(8 * heads, 64)
        self.k, self.v = nn.Linear(64, 8 * pairs), nn.Linear(64, 8 * pairs)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.o(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Two blocks, with positions for 32 tokens."""

    def __init__(self, heads: int = 8, pairs: int = 8) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 64), nn.Embedding(32, 64)
        self.h = nn.ModuleList(Attention(heads, pairs) for _ in range(2))
        self.head = nn.Linear(64, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize(("pairs", "sizes"), [(8, (1, 2, 4, 8)), (4, (1, 2, 4)), (2, (1, 2))])
def test_only_sizes_that_divide_the_heads_are_listed(pairs: int, sizes: tuple[int, ...]) -> None:
    report = shardplan.validate(Model(8, pairs), PLAN)
    assert report.ok and report.checked_tp == 2 and report.allowed_tp == sizes
    said = " (checked at 2; the others by size alone)" if len(sizes) > 2 else ""
    assert f"\ntp: {', '.join(map(str, sizes))}{said}" in report_text(report, color=False)


@pytest.mark.parametrize("tp", [16, 64])
def test_more_ranks_than_heads_are_refused_with_the_length(tp: int) -> None:
    """At tp=64 the reduced model would be called with more tokens than it has positions."""
    report = shardplan.validate(Model(), PLAN, {"tp": tp})
    (found,) = report.diagnostics
    assert (found.code, found.message) == (
        "SP303",
        f"the model's code splits a dimension of length 8, which tp={tp} does not divide",
    )
    assert found.help == "this plan and model allow tp 1, 2, 4, 8"
    assert "test_layout_lengths.py" in found.notes[0]


def test_a_split_vocabulary_does_not_limit_the_size() -> None:
    plan = {**PLAN, "tensor_parallel": {**RULES, "tokens": "embedding_rowwise", "head": "colwise_gather_output"}}
    report = shardplan.validate(Model(), plan, {"tp": 4})
    assert report.ok and 4 in report.allowed_tp
