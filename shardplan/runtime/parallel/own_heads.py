"""torch's own attention with the heads of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from shardplan.torchlib.heads_of_weights import HeadsOfWeights


def own_heads(forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
    """Wraps the forward of nn.MultiheadAttention: it computes with the heads that its matrices have."""
    with HeadsOfWeights():
        return forward(*args, **kwargs)
