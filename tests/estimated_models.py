"""Modules that the tests of `estimate` name."""

import torch
from torch import nn


class Plain(nn.Module):
    """An embedding [96, 64] and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 64)
        self.product = nn.Linear(64, 64, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.product(self.embedding(ids))


class Looks(Plain):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result = super().forward(ids)
        return result if float(result.sum()) > 0 else -result


def plain() -> nn.Module:
    return Plain()


def looks() -> nn.Module:
    return Looks()
