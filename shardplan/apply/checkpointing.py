"""Activation checkpointing inside a module's forward: its hooks (doors, FSDP2) stay outside and run once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from shardplan.torchlib.forward import wrap_forward


def _recompute(forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def checkpoint_modules(model: nn.Module, names: Iterable[str]) -> None:
    """Recompute the named modules' activations in backward."""
    for name in names:
        wrap_forward(model.get_submodule(name), _recompute)
