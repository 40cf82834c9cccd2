"""A model of one's own, without configuration, around blocks that a test brings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH = 32, 16


class Stack(nn.Module):
    """Returns its loss and its logits."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()), "logits": logits}


def tokens(seed: int) -> dict[str, Tensor]:
    return {"tokens": torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(seed))}
