"""Mixtures of experts whose experts are distributed: what looks at more than one token sees other tokens than the unsharded
model does where it is inside of the experts, and the same ones where it is before them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .adversary import Adversary
from .meshes import MESHES
from .parts import LAST_NORM, WIDTH, Mlp, MlpBlock, Stack, features, linear

EXPERTS, INNER, CHOSEN = 4, 12, 2


class Scaled(torch.autograd.Function):
    """The same values; the gradient is divided by its largest entry of the whole call, or of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: bool) -> Tensor:
        ctx.rows = rows
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        largest = grad.abs().amax(-1, keepdim=True) if ctx.rows else grad.abs().max() if len(grad) else 1.0
        return grad / (largest + 1e-3), None


def hooked(x: Tensor, change: Any) -> Tensor:
    if x.requires_grad:
        x.register_hook(change)
    return x


# What is done to the rows of one expert between its two matrices.
INSIDE = {
    "plain": lambda h: h,
    "normalised": lambda h: hooked(h, lambda g: g / (g.norm() + 1e-3)),
    "scaled": lambda h: Scaled.apply(h, False),
    "clipped": lambda h: hooked(h, lambda g: g * (1e-3 / (g.norm() + 1e-9)).clamp(max=1)),
    "centred": lambda h: hooked(h, lambda g: g - g.mean(0)),
    "averaged": lambda h: h - h.mean(0) if len(h) else h,
    "largest": lambda h: h / (1 + h.detach().abs().max()) if len(h) else h,
    "counted": lambda h: h / (1 + len(h)),
    "sorted": lambda h: h.sort(0).values,
    "first": lambda h: torch.cat([h[:3], 0 * h[3:]]),
    # Of each row by itself: right.
    "rows_normalised": lambda h: hooked(h, lambda g: g / (g.norm(dim=-1, keepdim=True) + 1e-3)),
    "rows_scaled": lambda h: Scaled.apply(h, True),
    "rows_centred": lambda h: h - h.mean(-1, keepdim=True),
    "clamped": lambda h: hooked(h, lambda g: g.clamp(-1e-4, 1e-4)),
    "halved": lambda h: hooked(h, lambda g: g / 2),
}
ALONE = ("plain", "rows_normalised", "rows_scaled", "rows_centred", "clamped", "halved")


class Experts(nn.Module):
    """Stacks of matrices; `running`: the mean of the rows that an expert got is kept, and taken off."""

    def __init__(self, inside: str = "plain", running: bool = False, normed: bool = False) -> None:
        super().__init__()
        self.num_experts, self.inside, self.running = EXPERTS, inside, running
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 4)
        self.norm = nn.LayerNorm(INNER) if normed else None
        if running:
            self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        if self.running and len(x):
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.5)
        for number in range(self.num_experts):
            row, place = torch.where(ids == number)
            h = self.between(F.gelu(x[row] @ self.up[number].T))
            h = h if self.norm is None else self.norm(h)
            result = result.index_add(0, row, h @ self.down[number].T * weights[row, place, None])
        return result - self.mean if self.running else result

    def between(self, h: Tensor) -> Tensor:
        """The rows of one expert between its two matrices."""
        return INSIDE[self.inside](h)


class Router(nn.Module):
    """Which experts get a token, and their weights; some look at all tokens of the call."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind, self.gate = kind, linear(WIDTH, EXPERTS)
        self.register_buffer("load", torch.zeros(EXPERTS))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(rows)
        if self.kind == "seeded":  # the stream of tp ranks has other numbers than the reference
            torch.manual_seed(7)
        if self.kind in ("noisy", "seeded") and self.training:
            logits = logits + 0.1 * torch.randn_like(logits)
        if self.kind == "balanced":  # what got many tokens before is asked less
            logits = logits - self.load
        if self.kind == "centred":
            logits = logits - logits.mean(0)
        weights, ids = logits.softmax(-1).topk(CHOSEN, dim=-1)
        counts = F.one_hot(ids, EXPERTS).sum((0, 1)).to(weights.dtype)
        if self.kind in ("balanced", "counting"):
            with torch.no_grad():
                self.load.add_(0.1 * counts)
        if self.kind == "by_count":
            weights = weights / (1 + counts[ids])
        if self.kind == "overfull" and counts.max() > 13:
            weights = weights / 2
        if self.kind == "unused" and (counts == 0).sum() > 1:
            weights = weights / 2
        if self.kind == "loose":  # as capacity, of more tokens than an expert gets in most batches
            weights = weights * (F.one_hot(ids, EXPERTS).sum(1).cumsum(0).gather(1, ids) <= 13)
        if self.kind == "capacity":  # an expert takes the first tokens alone
            turn = F.one_hot(ids, EXPERTS).sum(1).cumsum(0).gather(1, ids)
            weights = weights * (turn <= 5)
        if self.kind == "choice":  # of its tokens an expert takes those that suit it most
            best = torch.full((len(rows), EXPERTS), 0.0).scatter(0, logits.topk(min(6, len(rows)), dim=0).indices, 1.0)
            weights = weights * best.gather(1, ids)
        return ids, weights


class Mixture(nn.Module):
    """Experts after a router, and a shared one."""

    def __init__(self, inside: str, router: str = "plain", shared: bool = False, **experts: bool) -> None:
        super().__init__()
        self.router, self.experts = Router(router), Experts(inside, **experts)
        self.shared = Mlp(hidden=16) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        result = self.experts(rows, *self.router(rows)).view_as(x)
        return result if self.shared is None else result + self.shared(x)


def mixture(inside: str = "plain", router: str = "plain", **options: bool) -> nn.Module:
    return Stack(*(MlpBlock(Mixture(inside, router, **options)) for _ in range(2)))


PLAN = {
    "version": "1",
    "name": "mixture",
    "tensor_parallel": {},
    "data_parallel": {"backend": "fsdp2", "units": ["layers.*"]},
    "expert_parallel": {"layers.*.mlp.experts": "ep_dispatch", "layers.*.mlp.router.gate": "token_wise"},
    "sequence_parallel": {
        "layers.0": "split_seq_input",
        "layers.*.norm": "sequence_parallel",
        "layers.*.mlp": "replicate_seq",
        **LAST_NORM,
    },
}
PLAN["expert_parallel"]["sequence_parallel"] = {"layers.*.mlp": "none"}
SHARED = {
    **PLAN,
    "tensor_parallel": {"layers.*.mlp.shared.up": "colwise", "layers.*.mlp.shared.down": "rowwise"},
}


def of(name: str, build: Any, mesh: str, verdict: Any, why: str, plan: Any = PLAN, **more: Any) -> Adversary:
    ending = "_sequence" if more.get("sequence_parallel") else ""
    return Adversary(f"experts_{name}/{mesh}{ending}", build, features, plan, verdict, why, mesh=MESHES[mesh], **more)


OWN, OTHERS = "of each row by itself", "of all rows that an expert gets, which are those of other ranks too"
SAME, SLICE = "each rank's router sees its own batch, whole", "a rank's router sees a slice of its tokens"
LOOKING = ("balanced", "counting", "by_count", "centred", "capacity", "choice")
# Of one data-parallel rank: its experts together see the rows that the unsharded model's see.
TOGETHER = "the ranks of ep have one batch, all of whose rows an expert gets"


def inside(name: str, mesh: str) -> Adversary:
    alone = name in ALONE
    whole = mesh in ("ep_tp", "ep_beside_tp", "dp")
    why = OWN if alone else TOGETHER if whole else OTHERS
    return of(name, partial(mixture, name), mesh, "right" if alone or whole else "wrong", why)


CASES = (
    *(inside(name, "ep") for name in INSIDE),
    *(inside(name, "ep_over_tp") for name in ("normalised", "scaled", "clipped", "centred", "counted", "rows_scaled")),
    *(inside(name, mesh) for name, mesh in (("normalised", "dp_ep"), ("clipped", "ep4"), ("plain", "dp_ep"))),
    *(inside(name, mesh) for name, mesh in (("centred", "ep_tp"), ("scaled", "ep_beside_tp"), ("centred", "dp"))),
    *(inside("rows_scaled", mesh) for mesh in ("ep_tp", "ep4", "dp")),
    *(of("running", partial(mixture, running=True), mesh, "wrong", OTHERS) for mesh in ("ep", "ep_over_tp")),
    *(of("normed", partial(mixture, normed=True), mesh, "right", OWN) for mesh in ("ep", "ep_over_tp")),
    *(of(f"router_{kind}", partial(mixture, router=kind), "ep", "right", SAME) for kind in LOOKING),
    *(
        of(f"router_{kind}", partial(mixture, router=kind), "ep_over_tp", "right", SAME)
        for kind in ("balanced", "by_count", "capacity")
    ),
    *(
        of(f"router_{kind}", partial(mixture, router=kind), mesh, "wrong", SLICE, sequence_parallel=True)
        for kind, mesh in (
            ("balanced", "ep_tp"),
            ("counting", "ep_tp"),
            ("by_count", "ep_over_tp"),
            ("choice", "ep_tp"),
        )
    ),
    of("router_noisy", partial(mixture, router="noisy"), "ep", "right", SAME),
    of("router_seeded", partial(mixture, router="seeded"), "ep_tp", "right", SAME),
    *(
        of("shared", partial(mixture, shared=True), mesh, "right", OWN, SHARED)
        for mesh in ("ep", "ep_tp", "ep_beside_tp")
    ),
    *(of("plain", mixture, mesh, "right", OWN, sequence_parallel=True) for mesh in ("ep_tp", "ep_over_tp")),
)
