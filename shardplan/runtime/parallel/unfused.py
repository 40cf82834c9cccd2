"""Layers that one kernel may compute as a whole, skipping the moves of the modules below them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def unfused(forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
    """Wraps a module's forward: the module sees its `training` as False. If it is true and nothing is cached, transformers' state
    space layers call the kernel (`mamba_inner_fn`, `mamba2_split_conv1d_scan_combined`). The functions of the other path are
    differentiable too. The modules below keep their own `training`."""
    training = module.training
    module.training = False
    try:
        return forward(*args, **kwargs)
    finally:
        module.training = training
