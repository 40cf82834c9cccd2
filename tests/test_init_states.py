"""`init` on layers with a state: the rules of the built-in plans, read off the code of the unmodified module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from own_models import WIDTH, Stack, tokens
from torch import Tensor, nn

import shardplan
from shardplan import Model
from shardplan.compiler.automatic import auto_plan
from shardplan.compiler.bind import bind
from shardplan.core.mesh import MeshSizes
from shardplan.language import parse_plan, parse_text
from shardplan.model import find_model

HEADS, GROUPS, HEAD, STATE = 4, 2, 8, 4


def conv(channels: int) -> nn.Conv1d:
    return nn.Conv1d(channels, channels, 3, groups=channels, padding=2)


def causal(convolution: nn.Conv1d, x: Tensor) -> Tensor:
    """x: [batch, positions, channels]."""
    return F.silu(convolution(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)


def by_kernel(convolution: nn.Conv1d, x: Tensor) -> Tensor:
    """The same, as where a kernel gets the convolution's parameters."""
    x, weight = x.transpose(1, 2), convolution.weight.squeeze(1)
    x = F.conv1d(x, weight.unsqueeze(1), convolution.bias, padding=2, groups=x.shape[1])[..., : x.shape[2]]
    return F.silu(x).transpose(1, 2)


class GatedNorm(nn.Module):
    """An RMS norm of each group of features, times a gate."""

    def __init__(self, width: int, group: int) -> None:
        super().__init__()
        self.weight, self.group = nn.Parameter(torch.ones(width)), group

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x = (x * F.silu(gate)).unflatten(-1, (-1, self.group))
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).flatten(-2)


class StateSpace(nn.Module):
    """Like Mamba 2: gate, x, B, C and the step are one matrix; a group of heads shares B and C."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.groups, self.state = HEADS, GROUPS, STATE
        self.inner = HEADS * HEAD
        self.channels = self.inner + 2 * GROUPS * STATE
        self.norm = nn.RMSNorm(WIDTH)
        self.mix = Mixer(self.inner, self.channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.norm(x))


class Mixer(nn.Module):
    """The layer of a StateSpace."""

    def __init__(self, inner: int, channels: int) -> None:
        super().__init__()
        self.n_heads, self.n_groups, self.inner, self.channels, self.n_state = HEADS, GROUPS, inner, channels, STATE
        self.into = nn.Linear(WIDTH, inner + channels + HEADS)
        self.conv, self.gated = conv(channels), GatedNorm(inner, inner // GROUPS)
        self.decay, self.skip = nn.Parameter(torch.rand(HEADS)), nn.Parameter(torch.rand(HEADS))
        self.out = nn.Linear(inner, WIDTH)

    def forward(self, u: Tensor) -> Tensor:
        gate, xbc, step = self.into(u).split([self.inner, self.channels, self.n_heads], -1)
        x, b, c = by_kernel(self.conv, xbc).split([self.inner, *[self.n_groups * self.n_state] * 2], -1)
        x = x.unflatten(-1, (self.n_heads, HEAD))
        b, c = (v.unflatten(-1, (self.n_groups, STATE)) for v in (b, c))
        b, c = (v.repeat_interleave(self.n_heads // self.n_groups, 2) for v in (b, c))
        step = F.softplus(step)
        state, found = torch.zeros_like(x[:, 0, :, :, None] * b[:, 0, :, None]), []
        for t in range(u.shape[1]):
            keep = torch.exp(-self.decay * step[:, t])[..., None, None]
            state = keep * state + (step[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
            found.append((state * c[:, t, :, None]).sum(-1) + self.skip[:, None] * x[:, t])
        return self.out(self.gated(torch.stack(found, 1).flatten(-2), gate))


class DeltaNet(nn.Module):
    """Like a gated delta net: q, k and v are one matrix and one convolution, there are more heads of v than of k."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.RMSNorm(WIDTH), Delta()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.norm(x))


class Delta(nn.Module):
    """The layer of a DeltaNet."""

    def __init__(self) -> None:
        super().__init__()
        self.width_k, self.width_v = 2 * STATE, HEADS * HEAD
        self.qkv, self.z = nn.Linear(WIDTH, 2 * self.width_k + self.width_v), nn.Linear(WIDTH, self.width_v)
        self.b, self.a = nn.Linear(WIDTH, HEADS), nn.Linear(WIDTH, HEADS)
        self.conv, self.decay = conv(2 * self.width_k + self.width_v), nn.Parameter(torch.rand(HEADS))
        self.head_norm, self.out = nn.RMSNorm(HEAD), nn.Linear(self.width_v, WIDTH)

    def forward(self, u: Tensor) -> Tensor:
        q, k, v = causal(self.conv, self.qkv(u)).split([self.width_k, self.width_k, self.width_v], -1)
        q, k = (F.normalize(x.unflatten(-1, (-1, STATE)), dim=-1) for x in (q, k))
        v = v.unflatten(-1, (-1, HEAD))
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        beta, decay = self.b(u).sigmoid(), torch.exp(-self.decay * F.softplus(self.a(u)))
        state, found = torch.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None]), []
        for t in range(u.shape[1]):
            state = state * decay[:, t, :, None, None]
            seen = (state * k[:, t, :, :, None]).sum(-2)
            state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - seen))[:, :, None]
            found.append((state * q[:, t, :, :, None]).sum(-2))
        gated = self.head_norm(torch.stack(found, 1)) * F.silu(self.z(u).unflatten(-1, (-1, HEAD)))
        return self.out(gated.flatten(-2))


class ByChannels(nn.Module):
    """Like Mamba 1: the step, B and C are sums over all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.RMSNorm(WIDTH), Channels()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.norm(x))


class Channels(nn.Module):
    """The layer of a ByChannels."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.conv = nn.Linear(WIDTH, 4 * WIDTH, bias=False), conv(2 * WIDTH)
        self.select, self.step = nn.Linear(2 * WIDTH, 3 + 2 * STATE, bias=False), nn.Linear(3, 2 * WIDTH)
        self.decay, self.skip = nn.Parameter(torch.rand(2 * WIDTH, STATE)), nn.Parameter(torch.rand(2 * WIDTH))
        self.out = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        x, gate = self.into(u).chunk(2, -1)
        x = causal(self.conv, x)
        step, b, c = self.select(x).split([3, STATE, STATE], -1)
        step = F.softplus(self.step(step))
        state, found = torch.zeros_like(self.decay).expand(u.shape[0], -1, -1), []
        for t in range(u.shape[1]):
            state = torch.exp(-self.decay * step[:, t, :, None]) * state
            state = state + (step[:, t] * x[:, t])[..., None] * b[:, t, None]
            found.append((state * c[:, t, None]).sum(-1) + self.skip * x[:, t])
        return self.out(torch.stack(found, 1) * F.silu(gate))


def made(block: type[nn.Module], tp: int = 2) -> dict[str, Any]:
    """What `init` writes for a model of such blocks, proven in both variants."""
    model = Stack(block)
    plan = shardplan.init_plan(shardplan.Model(model, inputs=tokens), tp=tp, sequence_parallel=True)
    report = shardplan.validate(shardplan.Model(model, inputs=tokens), plan.document, {"tp": tp})
    assert report.ok and report.proof is not None and report.proof.ok, report.diagnostics
    assert not parse_text(
        plan.text
    ).diagnostics  # the counts of a model without configuration are texts in the file too
    return dict(plan.document["tensor_parallel"])


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_state_space_layer_of_ones_own(tp: int) -> None:
    rules = made(StateSpace, tp)
    inner, shared = HEADS * HEAD, GROUPS * STATE
    packed = [f"{HEADS} * {HEAD}", f"{GROUPS} * {STATE}", f"{GROUPS} * {STATE}"]
    assert rules["layers.*.mix.into"] == {
        "style": "packed_colwise",
        "packed": [packed[0], *packed, str(HEADS)],
        "heads": [str(n) for n in (HEADS, HEADS, GROUPS, GROUPS, HEADS)],
    }
    assert rules["layers.*.mix.conv"]["packed"] == packed and rules["layers.*.mix.conv"]["style"] == "packed_depthwise"
    assert rules["layers.*.mix.gated"] == {"style": "colwise_norm", "shares": [{"group": {"groups": str(GROUPS)}}]}
    assert {rules[f"layers.*.mix.{name}"] for name in ("decay", "skip")} == {"colwise"}
    counted = ["n_heads", "n_groups", "inner", {"channels": "inner + 2 * n_groups * n_state"}]
    assert rules["layers.*.mix"]["shares"] == counted
    assert inner + 2 * shared == StateSpace().channels


def test_a_delta_net_of_ones_own() -> None:
    rules = made(DeltaNet)
    sizes = {"packed": [f"2 * {STATE}", f"2 * {STATE}", f"{HEADS} * {HEAD}"], "heads": ["2", "2", str(HEADS)]}
    assert rules["layers.*.mix.qkv"] == {"style": "packed_colwise", **sizes}
    assert rules["layers.*.mix.conv"] == {"style": "packed_depthwise", **sizes}
    assert rules["layers.*.mix"] == {"style": "input_with_grad_allreduce", "shares": ["width_k", "width_v"]}
    assert rules["layers.*.mix.head_norm"] == "replicated_with_grad_allreduce"
    assert (rules["layers.*.mix.decay"], rules["layers.*.mix.out"]) == ("colwise", "rowwise")


def test_a_layer_of_channels_of_ones_own() -> None:
    rules = made(ByChannels)
    styles = {
        name: rules[f"layers.*.mix.{name}"] for name in ("into", "conv", "select", "step", "decay", "skip", "out")
    }
    assert styles == {
        "into": "packed_colwise",
        "conv": "depthwise",
        "select": "rowwise_with_grad_allreduce",
        "step": "colwise",
        "decay": "colwise",
        "skip": "colwise",
        "out": "rowwise",
    }


def of_states(plan: Any, name: str) -> dict[str, tuple[Any, ...]]:
    """What a plan says of each module and parameter of the layers with a state. Where the sum is reduced, at the last matrix or after
    it, is no part of that, nor for which releases of the class a rule is."""
    resolved, _ = bind(plan, find_model(name).tree, MeshSizes(tp=2))
    named = {
        name: (a.rule.style, {**a.rule.options, "output": None, "having": None})
        for name, a in resolved.assignments.items()
    }
    return {n: said for n, said in named.items() if (".mixer" in n or ".mamba" in n) and "out_proj" not in n}


@pytest.mark.parametrize(
    "name",
    [
        "mamba2",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("bamba", "mamba")),
        *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("granitemoehybrid", "falcon_mamba")),
    ],
)
def test_the_rules_of_the_built_in_plan(name: str) -> None:
    """Every module of the mixer: the same style, parts, heads, groups and numbers."""
    found = parse_plan(dict(shardplan.init_plan(Model(name), sequence_parallel=True).document)).plan
    built_in = auto_plan(find_model(name).tree).plan
    assert found is not None and built_in is not None and found.has_overlay
    mine, theirs = (of_states(plan, name) for plan in (found, built_in))
    assert {n: said for n, said in mine.items() if said != theirs.get(n)} == {}
    assert mine.keys() >= {n for n, (style, _) in theirs.items() if style != "none"}


@pytest.mark.slow
def test_a_bias_that_the_modules_code_reads() -> None:
    model = Model("mamba", settings={"use_bias": True})
    plan = shardplan.init_plan(model, sequence_parallel=True).document
    rules = plan["tensor_parallel"]
    assert rules["backbone.layers.*.mixer"]["output"] == "all_reduce"
    assert rules["backbone.layers.*.mixer.out_proj.bias"] == "replicated_divided"
    assert shardplan.validate(model, plan, {"tp": 2}).ok
