"""nn.TransformerEncoder without its fast path for evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.backends import mha


def without_fast_path(forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
    """Wraps the forward of nn.TransformerEncoder. In evaluation without gradients it would make one nested tensor of padded
    sequences, which cannot be sliced or gathered. Its layers need no wrapper: where they see hooks, they run module by module."""
    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        return forward(*args, **kwargs)
    finally:
        mha.set_fastpath_enabled(before)
