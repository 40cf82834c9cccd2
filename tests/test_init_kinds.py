"""`init` on models of one's own whose blocks have one name for layers of several kinds: a linear recurrence, and attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from own_models import WIDTH, Stack, tokens
from torch import Tensor, nn

import shardplan
from shardplan import Model

HEADS, INNER = 4, 2 * WIDTH


class Gates(nn.Module):
    """Two gates of each channel, from the channels of its head."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.size = HEADS, INNER // HEADS
        self.keep, self.take = (nn.Parameter(torch.randn(HEADS, self.size, self.size)) for _ in range(2))
        self.keep_bias, self.rate = nn.Parameter(torch.rand(HEADS, self.size)), nn.Parameter(torch.rand(INNER))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def both(self, keep: Tensor, take: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        decay = torch.exp(-F.softplus(self.rate) * torch.sigmoid(keep.reshape(x.shape)))
        return decay, torch.sigmoid(take.reshape(x.shape)) * (1 - decay)


class EinsumGates(Gates):
    """By einsum over [tokens, heads, channels of a head]."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        heads = x.reshape(-1, self.count, self.size)
        keep = torch.einsum("nhi,hij->nhj", heads, self.keep) + self.keep_bias
        return self.both(keep, torch.einsum("nhi,hij->nhj", heads, self.take), x)


class BatchedGates(Gates):
    """By one product for each head, [heads, tokens, channels of a head]."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        heads = x.reshape(-1, self.count, self.size).transpose(0, 1)
        keep = torch.baddbmm(self.keep_bias[:, None], heads, self.keep)
        return self.both(keep.transpose(0, 1), torch.bmm(heads, self.take).transpose(0, 1), x)


class Recurrence(nn.Module):
    """Like an RG-LRU: a convolution, a recurrence of each channel by itself, and a gate next to it."""

    def __init__(self, gates: type[Gates]) -> None:
        super().__init__()
        self.inner = INNER
        self.value, self.aside = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.short = nn.Conv1d(INNER, INNER, 3, groups=INNER, padding=2)
        self.gates, self.out = gates(), nn.Linear(INNER, WIDTH)

    def forward(self, u: Tensor) -> Tensor:
        x = self.short(self.value(u).transpose(1, 2))[..., : u.shape[1]].transpose(1, 2)
        keep, take = self.gates(x)
        state, found = torch.zeros(u.shape[0], self.inner), []
        for t in range(u.shape[1]):
            state = keep[:, t] * state + take[:, t] * x[:, t]
            found.append(state)
        return self.out(torch.stack(found, 1) * F.gelu(self.aside(u)))


class Attention(nn.Module):
    """With matrices that are called as those of a Recurrence, and norms over the features of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.query_norm, self.key_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query_norm(self.query(x)), self.key_norm(self.key(x)), self.value(x)
        q, k, v = (t.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for t in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, mix: nn.Module) -> None:
        super().__init__()
        self.norm, self.mix = nn.RMSNorm(WIDTH), mix

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.norm(x))


def hybrid(gates: type[Gates]) -> nn.Module:
    mixes = iter((Recurrence(gates), Attention()))
    return Stack(lambda: Block(next(mixes)))


@pytest.mark.parametrize(
    "gates",
    [
        pytest.param(EinsumGates, marks=pytest.mark.slow),
        pytest.param(BatchedGates, marks=pytest.mark.exhaustive),
    ],
)
def test_a_recurrence_among_attention(gates: type[Gates]) -> None:
    """Each kind has its rules, those that both have are one, and the recurrence is split by channels, its gates by heads."""
    model = hybrid(gates)
    plan = shardplan.init_plan(shardplan.Model(model, inputs=tokens), sequence_parallel=True)
    report = shardplan.validate(shardplan.Model(model, inputs=tokens), plan.document, {"tp": 2})
    assert report.ok and report.proof is not None and report.proof.ok, report.diagnostics
    assert "layers.0" in plan.document["sequence_parallel"]
    rules = dict(plan.document["tensor_parallel"])
    assert rules["layers.*.{mix}"]["shares"] == ["inner"]
    assert rules["layers.*.{mix}"]["having"] in ("aside", "short", "gates")
    below = {name.removeprefix("layers.*.mix."): style_of(rule) for name, rule in rules.items()}
    assert {below[name] for name in ("query", "key", "value", "aside")} == {"colwise"}
    assert {below[name] for name in ("query_norm", "key_norm")} == {"colwise_norm"}
    assert (below["short"], below["out"]) == ("depthwise", "rowwise")
    assert rules["layers.*.mix.gates"] == {"style": "local_params", "shares": ["count"]}
    assert {below[f"gates.{name}"] for name in ("keep", "take")} == {"headwise"}
    assert {below[f"gates.{name}"] for name in ("keep_bias", "rate")} == {"colwise"}


@pytest.mark.slow
def test_what_runs_with_another_input_alone() -> None:
    """Cross-attention runs where a decoder is given an encoder's states, which is its second kind of input."""
    plan = shardplan.init_plan(Model("bart"), sequence_parallel=True).document
    for attention in ("self_attn", "encoder_attn"):
        part = f"model.decoder.layers.*.{attention}"
        rules, sliced = (plan[section] for section in ("tensor_parallel", "sequence_parallel"))
        assert {rules[f"{part}.{name}_proj"] for name in "qkv"} == {"colwise"} and rules[
            f"{part}.out_proj"
        ] == "rowwise"
        assert (rules[part], sliced[part]) == ("input_with_grad_allreduce", "gather_seq_input")


def style_of(rule: Any) -> str:
    return rule if isinstance(rule, str) else rule["style"]
