"""Mixtures of experts in plain loops, with experts that get no tokens."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from .adversary import Adversary, document
from .parts import BLOCK_INPUT, MLP_SEQUENCE, PARTIAL, WIDTH, Mlp, MlpBlock, Stack, features, linear, without


class Mixture(nn.Module):
    """Each token goes to two of four experts; with `starved`, one expert is never chosen, and not run."""

    def __init__(self, starved: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.router, self.experts = linear(WIDTH, 4), nn.ModuleList(Mlp(hidden=16) for _ in range(4))
        self.shared = Mlp(hidden=16) if shared else None
        self.register_buffer("closed", torch.tensor([0.0, 0.0, 0.0, -1e9 if starved else 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = (self.router(rows) + self.closed).softmax(-1).topk(2, dim=-1)
        result = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            if len(row):
                result = result.index_add(0, row, expert(rows[row]) * weights[row, place, None])
        result = result.view_as(x)
        return result if self.shared is None else result + self.shared(x)


def of(*arguments: bool) -> nn.Module:
    return Stack(MlpBlock(Mixture(*arguments)), MlpBlock(Mixture(*arguments)))


class Probabilities(Stack):
    """The model also returns how likely each expert was, for an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__(MlpBlock(Mixture()), MlpBlock(Mixture()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seen = []
        hooks = [layer.mlp.router.register_forward_hook(lambda *said: seen.append(said[2])) for layer in self.layers]
        y = self.trunk(x)
        for hook in hooks:
            hook.remove()
        return y, torch.stack([one.softmax(-1).mean(0) for one in seen]).square().sum()


EACH = {"layers.*.mlp.experts.*.up": "colwise", "layers.*.mlp.experts.*.down": "rowwise"}
TOGETHER = {
    "layers.*.mlp": {"style": BLOCK_INPUT, "output": "all_reduce"},
    "layers.*.mlp.router": PARTIAL,
    "layers.*.mlp.experts.*.up.weight": "colwise",
    "layers.*.mlp.experts.*.down.weight": "rowwise",
}
SHARED = {"layers.*.mlp.shared.up": "colwise", "layers.*.mlp.shared.down": "rowwise"}
SEQUENCE = {
    **{name: rule for name, rule in MLP_SEQUENCE.items() if "mlp" not in name},
    "layers.*.mlp": {"style": "gather_seq_input", "output": "reduce_scatter"},
}
CASES = (
    Adversary("mixture/right", of, features, document(EACH), "right", "each expert sums by itself"),
    Adversary("mixture/together", of, features, document(TOGETHER), "right", "the block sums once"),
    Adversary(
        "mixture/sequence", of, features, document(TOGETHER, SEQUENCE), "right", "the same", sequence_parallel=True
    ),
    Adversary(
        "mixture/bare_router",
        of,
        features,
        document(without(TOGETHER, "layers.*.mlp.router")),
        "wrong",
        "the router's gradient is a sum over a rank's part of the experts",
    ),
    Adversary(
        "mixture/no_door",
        of,
        features,
        document({**TOGETHER, "layers.*.mlp": "all_reduce"}),
        "wrong",
        "the input's gradient is not added up",
    ),
    Adversary(
        "mixture/shared_twice",
        partial(of, False, True),
        features,
        document({**TOGETHER, **SHARED}),
        "wrong",
        "the shared expert sums by itself, and the block sums that again",
    ),
    Adversary(
        "mixture/shared", partial(of, False, True), features, document({**EACH, **SHARED}), "right", "each by itself"
    ),
    Adversary("mixture/starved", partial(of, True), features, document(EACH), "unproven", "an expert gets no tokens"),
    Adversary("mixture/probabilities", Probabilities, features, document(EACH), "right", "the router is whole"),
    Adversary(
        "mixture/probabilities_together",
        Probabilities,
        features,
        document(TOGETHER),
        "wrong",
        "the auxiliary loss is computed whole on every rank, and its gradient added up",
    ),
)
