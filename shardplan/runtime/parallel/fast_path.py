"""nn.TransformerEncoder without what it does for evaluation alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.backends import mha


def without_fast_path(forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
    """Around the forward of nn.TransformerEncoder. In evaluation without gradients it makes one nested tensor of sequences that are
    padded, which cannot be sliced or gathered. Its layers see hooks, and run their modules by themselves."""
    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        return forward(*args, **kwargs)
    finally:
        mha.set_fastpath_enabled(before)
