"""What most steps are made with."""

from __future__ import annotations

import torch
from torch import nn


def make(model: nn.Module) -> torch.optim.Optimizer:
    """Of a pipeline too."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)
