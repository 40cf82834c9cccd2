"""Small models whose blocks read one value several times, or add up what they made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardplan.compiler.bind import bind
from shardplan.compiler.check import check
from shardplan.compiler.layout import LayoutReport, RecordedModel, check_layout
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import ResolvedPlan
from shardplan.language import parse_plan
from shardplan.model import tree_of

HIDDEN, HEADS, WIDTH = 16, 4, 24


class Part(nn.Module):
    """gelu(x a) * (x b), projected back."""

    def __init__(self, hidden: int = HIDDEN, width: int = WIDTH):
        super().__init__()
        self.a, self.b = nn.Linear(hidden, width, bias=False), nn.Linear(hidden, width)
        self.o = nn.Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(nn.functional.gelu(self.a(x)) * self.b(x))


class JointAttention(nn.Module):
    """Attention over two streams, as in SD3, Flux and Qwen-Image: one module, two shared inputs."""

    def __init__(self) -> None:
        super().__init__()
        names = ("q", "k", "v", "add_q", "add_k", "add_v", "o", "add_o")
        self.layers = nn.ModuleDict({name: nn.Linear(HIDDEN, HIDDEN) for name in names})

    def forward(self, x: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (
            torch.cat([self._heads(self.layers[f"add_{n}"](c)), self._heads(self.layers[n](x))], 2) for n in "qkv"
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.layers["o"](y[:, c.shape[1] :]), self.layers["add_o"](y[:, : c.shape[1]])

    @staticmethod
    def _heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)


class JointBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_c, self.attention = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN), JointAttention()

    def forward(self, x: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        y, d = self.attention(self.norm(x), self.norm_c(c))
        return x + y, c + d


class Joint(nn.Module):
    """Two streams through two blocks."""

    def __init__(self, mode: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList([JointBlock(), JointBlock()])

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        for block in self.blocks:
            x, c = block(x, c)
        return torch.cat([x, c], 1)


JOINT = {
    "blocks.*.attention.layers.{q,k,v,add_q,add_k,add_v}": "colwise",
    "blocks.*.attention.layers.{o,add_o}": "rowwise",
}


class Parallel(nn.Module):
    """x + first(norm(x)) + second(norm(x)).

    Args:
        mode: "" is that; "skip first", "skip second": without one of them; "third": with another reader;
            "checkpoint first", "checkpoint second", "checkpoint both", "checkpoint sum": these parts in a checkpoint, with
            "reentrant" in the old one; "in place": the value is changed between the two; "no grad": a reader without gradients runs first;
            "norm of second": one is not just added; "swap": the second runs first; "drop": a dropout after the first.
    """

    def __init__(self, mode: str = "") -> None:
        super().__init__()
        self.mode = mode
        self.norm, self.first, self.second, self.third = nn.LayerNorm(HIDDEN), Part(), Part(), Part()
        self.drop = nn.Dropout(0.0)
        if "in place" in mode:  # autograd does not keep what frozen matrices read
            for part in (self.first.a, self.first.b):
                part.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y, mode = self.norm(x), self.mode
        reentrant = "reentrant" in mode

        def run(part: Callable[[Tensor], Tensor], name: str) -> Tensor:
            if f"checkpoint {name}" in mode:
                return checkpoint(part, y, use_reentrant=reentrant)
            return part(y)

        if "fail" in mode:
            self.first(y)
            raise KeyError("in between")
        if "no grad" in mode:
            with torch.no_grad():
                self.first(y)
        if "checkpoint both" in mode:
            return x + checkpoint(lambda y: self.first(y) + self.second(y), y, use_reentrant=reentrant)
        if "checkpoint sum" in mode:
            a = self.first(y)
            return x + checkpoint(lambda a, y: torch.tanh(a + self.second(y)), a, y, use_reentrant=reentrant)
        if "swap" in mode:
            b = self.second(y)
            return x + b + self.first(y)
        if "skip first" not in mode:
            x = x + (self.drop(run(self.first, "first")) if "drop" in mode else run(self.first, "first"))
        if "in place" in mode:
            y.mul_(2)
        if "skip second" not in mode:
            b = run(self.second, "second")
            x = x + (torch.tanh(b) if "norm of second" in mode else b)
        return x + self.third(y) if "third" in mode else x


class Stack(nn.Module):
    """Two such blocks."""

    def __init__(self, mode: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Parallel(mode), Parallel(mode)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Flat(nn.Module):
    """Readers outside of any block."""

    def __init__(self, mode: str = "") -> None:
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(HIDDEN), Part(), Part()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.one(y) * self.two(y)


SPLIT = {"blocks.*.{first,second,third}.{a,b}": "colwise", "blocks.*.{first,second,third}.o": "rowwise"}
SUMMED = {**SPLIT, "blocks.*": {"sum_outputs": ["first.o", "second.o"]}}
FLAT = {"{one,two}.{a,b}": "colwise", "{one,two}.o": "rowwise"}


def made(build: Callable[..., nn.Module], mode: str = "", dtype: torch.dtype = torch.float32) -> nn.Module:
    """Always with the same weights."""
    torch.manual_seed(0)
    return build(mode).to(dtype)


def inputs_of(build: Callable[..., nn.Module], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    names = ("x", "c") if build is Joint else ("x",)
    return {
        name: torch.randn(2, 4 + i, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
        for i, name in enumerate(names)
    }


def document(rules: Mapping[str, Any]) -> dict[str, Any]:
    return {"version": "1", "name": "case", "tensor_parallel": dict(rules)}


def bound(model: nn.Module, rules: Mapping[str, Any], tp: int = 2) -> ResolvedPlan:
    """A plan without errors, not yet proven."""
    plan, findings = bind(parse_plan(document(rules)).plan, tree_of(model), MeshSizes(tp=tp))
    wrong = [d for d in (*findings, *check(plan, seq_len=None)) if d.is_error]
    assert not wrong, wrong
    return plan


def checked(
    build: Callable[..., nn.Module], rules: Mapping[str, Any], recorded: str = "", tp: int = 2
) -> tuple[ResolvedPlan, LayoutReport]:
    """The plan with what the layout check saw in a run of the model in that mode."""
    model = made(build, recorded)
    plan = bound(model, rules, tp)
    report = check_layout(plan, [RecordedModel(model, inputs_of(build), plan.tree)])
    return report.onto(plan), report


class TwoReaders(nn.Module):
    """Two matrices of one tensor, or of one each."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        return self.o(self.q(x) * self.k(x if other is None else other))


class Separating(nn.Module):
    """Blocks of one class; some hand two tensors to the matrices."""

    def __init__(self, separate: bool):
        super().__init__()
        self.separate = separate
        self.norm, self.norm2, self.attn = nn.LayerNorm(16), nn.LayerNorm(16), TwoReaders()

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norm(x), self.norm2(x)
        return x + (self.attn(first, second) if self.separate else self.attn(first + second))


class Separated(nn.Module):
    def __init__(self, *separate: bool):
        super().__init__()
        self.blocks = nn.ModuleList(map(Separating, separate))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x
