"""Models on ranks of experts, of the sequence and of stages whose code asks how many tokens there are: of an expert, of a call, of a row."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .adversary import Adversary
from .branches import RARE, longer
from .context import EXCHANGED, OWN, SLICE, WHOLE
from .context import MESHES as OVER_CP
from .context import plan as over_cp
from .meshes import MESHES
from .mixtures import OTHERS, PLAN, SAME, TOGETHER, Experts, Mixture, Router
from .own_choices import alike
from .parts import Block, MlpBlock, Stack
from .stages import ONE_BY_ONE, OWN_PLAN, Own, squared


class Skipping(Experts):
    """Experts without tokens are skipped."""

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for number in range(self.num_experts):
            row, place = torch.where(ids == number)
            if row.numel() == 0:
                continue
            h = F.gelu(x[row] @ self.up[number].T)
            result = result.index_add(0, row, h @ self.down[number].T * weights[row, place, None])
        return result


class Returning(Experts):
    """Without tokens nothing runs."""

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return x if len(x) < 1 else super().forward(x, ids, weights)


class Centring(Experts):
    """Takes off the mean of an expert's rows where there are many."""

    def between(self, h: Tensor) -> Tensor:
        return h - h.mean(0) if h.shape[0] > 100 else h


class Waving(Experts):
    """With these numbers the first rows and the last ones choose the second layer's first expert: the mask alone fits two orders of rows."""

    def between(self, h: Tensor) -> Tensor:
        return torch.sin(h)


class Limited(Router):
    """Of many tokens an expert takes the first."""

    def limit(self, ids: Tensor, weights: Tensor, tokens: int) -> Tensor:
        if tokens > 100:
            weights = weights * (F.one_hot(ids).sum(1).cumsum(0).gather(1, ids) <= tokens // 4)
        return weights

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = super().forward(rows)
        return ids, self.limit(ids, weights, rows.shape[0])


class Handing(Own):
    """Of long rows what the first layer returned is added in the end."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x)
        if x.shape[1] > 100:
            x = x + first
        return self.norm(x)


def mixture(experts: type[Experts] | None = None, router: type[Router] = Router, block: Any = MlpBlock) -> nn.Module:
    layers = []
    for _ in range(2):
        mlp = Mixture("plain")
        mlp.experts, mlp.router = mlp.experts if experts is None else experts(), router()
        layers.append(block(mlp=mlp))
    return Stack(*layers)


def handing() -> nn.Module:
    return Handing(*(MlpBlock() for _ in range(4)))


def long_pairs(seed: int) -> dict[str, Tensor]:
    """The rows of a rare batch are long."""
    shape = (2, 4, 8 if seed < 100 else 200, 16)
    x, labels = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).unbind()
    return {"x": x, "labels": labels}


def of(
    name: str, mesh: str, build: Any, verdict: Any, why: str, inputs: Any, plan: Any = PLAN, **more: Any
) -> Adversary:
    ending = "_sequence" if more.get("sequence_parallel") else ""
    sizes = {**MESHES, **OVER_CP}[mesh]
    return Adversary(f"sides_{name}/{mesh}{ending}", build, inputs, plan, verdict, why, mesh=sizes, seeds=RARE, **more)


CARRIED = {**OWN_PLAN, "pipeline_parallel": {"layers": "layers.*", "carry": ["layers.0"]}}
LIMITED = partial(mixture, router=Limited)
CASES = (
    *(
        of(name, mesh, partial(mixture, experts), "right", OWN, alike)
        for name, experts in (("skipping", Skipping), ("returning", Returning))
        for mesh in ("ep", "ep_tp", "ep_over_tp", "dp_ep")
    ),
    *(
        of("centring", mesh, partial(mixture, Centring, block=block), verdict, why, longer, plan)
        for mesh, block, verdict, why, plan in (
            ("ep", MlpBlock, "wrong", OTHERS, PLAN),
            ("ep_tp", MlpBlock, "right", TOGETHER, PLAN),
            ("cp_dp_ep", Block, "wrong", OTHERS, over_cp(WHOLE, ep=True)),
        )
    ),
    of("waving", "cp_ep", partial(mixture, Waving, block=Block), "right", OWN, alike, over_cp(EXCHANGED, ep=True)),
    *(
        of(
            "handing",
            mesh,
            handing,
            "wrong",
            "the last stage has nothing of it",
            long_pairs,
            OWN_PLAN,
            stage_loss=squared,
        )
        for mesh in ("pp", "pp_tp")
    ),
    *(
        of("handing_carried", mesh, handing, "right", ONE_BY_ONE, long_pairs, CARRIED, stage_loss=squared)
        for mesh in ("pp", "pp_tp")
    ),
    *(of("limited", mesh, LIMITED, "right", SAME, longer) for mesh in ("ep", "ep_over_tp")),
    of("limited", "ep_tp", LIMITED, "wrong", SLICE, longer, sequence_parallel=True),
    of("limited", "cp_ep", partial(LIMITED, block=Block), "wrong", SLICE, longer, over_cp(WHOLE, ep=True)),
)
