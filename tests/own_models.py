"""A model of one's own, without configuration, around blocks that a test brings."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH = 32, 16


class Decoder(nn.Module):
    """An embedding, blocks and a head; returns its logits."""

    def __init__(self, block: Callable[[], nn.Module], layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Stack(Decoder):
    """Returns its loss and its logits."""

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        logits = super().forward(tokens)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()), "logits": logits}


def tokens(seed: int) -> dict[str, Tensor]:
    return {"tokens": torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(seed))}
