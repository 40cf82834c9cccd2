"""Models that a cut must not change: they count, read labels in every block, drop tokens, or have hooks and forwards that somebody put there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, LENGTH, ROWS = 64, 32, 8, 8
IGNORED = -100


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class ReadsLabels(Block):
    """As a model that masks by what is predicted."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is not None, "a stage has no labels"
        return super().forward(x * (1 + 0.5 * (labels != IGNORED).to(x.dtype).unsqueeze(-1)))


class Counts(Block):
    """What it computes follows from how often it ran: by a number, a list and a buffer; and from a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, []
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.count += 1
        self.mean.lerp_(x.detach().mean((0, 1)).to(self.mean.dtype), 0.5)
        factor = 1 + 0.1 * self.calls + 0.1 * len(self.seen) + 0.1 * self.count
        return super().forward((x - self.mean) * factor)


class Drops(Block):
    """Every other token goes on, in training."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return super().forward(x[:, ::2] if self.training and x.shape[1] == LENGTH else x)


class Net(nn.Module):
    """Args:
    own: its loss is its own, which counts as transformers' does.
    """

    def __init__(self, block: type[nn.Module] = Block, *, own: bool = False):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        if own:
            self.loss_function = divided

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, labels)
        logits = self.head(x)
        if hasattr(self, "loss_function"):
            return SimpleNamespace(logits=logits, loss=self.loss_function(logits, labels))
        return logits


def nll(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum over the tokens themselves, not the next ones; of those that are left."""
    step = labels.shape[1] // logits.shape[1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, ::step].flatten(), reduction="sum")


def divided(logits: Tensor, labels: Tensor, num_items_in_batch: Any = None, **kwargs: Any) -> Tensor:
    return nll(logits, labels) / ((labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)
