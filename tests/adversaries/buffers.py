"""Buffers that a forward writes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .adversary import Adversary, document
from .parts import BLOCK_INPUT, HIDDEN, MLP, MLP_SEQUENCE, PARTIAL, WIDTH, Mlp, MlpBlock, Stack, features, linear


class Watch(nn.Module):
    """Keeps the running mean of what passes, and may take it off."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.used = used
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        result = x - self.mean if self.used else x
        with torch.no_grad():
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
            self.steps += 1
        return result


class Watched(MlpBlock):
    def __init__(self, used: bool) -> None:
        super().__init__()
        self.watch = Watch(used)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(self.watch(x)))


def watched() -> nn.Module:
    return Stack(Watched(False), Watched(False))


def centred() -> nn.Module:
    return Stack(Watched(True), Watched(True))


class Largest(Mlp):
    """Keeps the largest hidden value, as quantisers do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest, h.detach().abs().max()))
        return self.down(h)


def largest() -> nn.Module:
    return Stack(MlpBlock(Largest()))


class BatchNorm(MlpBlock):
    """A norm over all tokens, with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x.transpose(1, 2)).transpose(1, 2))


def batch_norm() -> nn.Module:
    return Stack(BatchNorm(), BatchNorm())


class Balanced(nn.Module):
    """Experts chosen with a bias that the forward moves towards an even load, without an auxiliary loss."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = linear(WIDTH, experts)
        self.up = nn.Parameter(torch.randn(experts, HIDDEN, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(experts, WIDTH, HIDDEN) / 4)
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).sigmoid()
        chosen = (scores + self.bias).topk(2, dim=-1).indices
        weight = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        if self.training:
            load = torch.zeros_like(self.bias).index_add(
                0, chosen.flatten(), torch.ones_like(scores[..., :2]).flatten()
            )
            with torch.no_grad():
                self.bias.add_(0.01 * (load.mean() - load).sign())
        h = torch.relu(torch.einsum("bsd,ehd->ebsh", x, self.up))
        return torch.einsum("ebsh,edh,bse->bsd", h, self.down, weight)


def balanced() -> nn.Module:
    return Stack(MlpBlock(Balanced()), MlpBlock(Balanced()))


EXPERTS = {
    "layers.*.mlp": {"style": BLOCK_INPUT, "output": "all_reduce"},
    "layers.*.mlp.router": PARTIAL,
    "layers.*.mlp.up": "colwise",
    "layers.*.mlp.down": "rowwise",
}
LATE_SPLIT = {**MLP_SEQUENCE, "layers.*.watch": "replicate_seq"}
CASES = (
    Adversary("running_mean/right", watched, features, document(MLP), "right", "the residual stream is whole"),
    Adversary(
        "running_mean/slice",
        watched,
        features,
        document(MLP, MLP_SEQUENCE),
        "wrong",
        "the mean is over a rank's slice of the sequence, and no output shows it",
        sequence_parallel=True,
    ),
    Adversary(
        "running_mean/gathered",
        watched,
        features,
        document(MLP, LATE_SPLIT),
        "right",
        "the module sees the whole sequence",
        sequence_parallel=True,
    ),
    Adversary("centred/right", centred, features, document(MLP), "right", "the residual stream is whole"),
    Adversary(
        "centred/slice",
        centred,
        features,
        document(MLP, MLP_SEQUENCE),
        "wrong",
        "the mean of a slice is taken off in the next step",
        sequence_parallel=True,
    ),
    Adversary(
        "largest/split",
        largest,
        features,
        document(MLP),
        "wrong",
        "each rank keeps the largest of its own features",
    ),
    Adversary("batch_norm/right", batch_norm, features, document(MLP), "right", "the norm sees every token"),
    Adversary(
        "batch_norm/slice",
        batch_norm,
        features,
        document(MLP, MLP_SEQUENCE),
        "wrong",
        "the norm's mean is over a slice of the sequence",
        sequence_parallel=True,
    ),
    Adversary("balanced/right", balanced, features, document(EXPERTS), "right", "the router sees every token"),
    Adversary(
        "balanced/sequence",
        balanced,
        features,
        document(
            {**EXPERTS},
            {
                **{k: v for k, v in MLP_SEQUENCE.items() if "mlp" not in k},
                "layers.*.mlp": {"style": "gather_seq_input", "output": "reduce_scatter"},
            },
        ),
        "right",
        "the router sees every token after the gather",
        sequence_parallel=True,
    ),
    Adversary(
        "balanced/slice",
        balanced,
        features,
        document(
            {"layers.*.mlp.router": "replicate"},
            {
                "layers.0": "split_seq_input",
                "layers.*.norm": "sequence_parallel",
                "layers.*.mlp": {"style": "sequence_parallel"},
                "layers.*.mlp.router": {"style": PARTIAL},
                "norm": {"style": "sequence_parallel", "output": "gather"},
            },
        ),
        "wrong",
        "the router's bias follows the load of a slice of the sequence",
        sequence_parallel=True,
    ),
)
