"""Activation checkpointing inside a module's forward: its hooks (block inputs, FSDP2) stay outside and run once."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from shardplan.core.sections import ActivationCheckpointing
from shardplan.runtime.parallel.forward import Around, wrap_forward
from shardplan.runtime.parallel.selective import keep_products


def _full(forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _selective(forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, context_fn=keep_products, **kwargs)


MODES: dict[str, Around] = {"full": _full, "selective": _selective}


def checkpoint_modules(
    model: nn.Module, names: Iterable[str], section: ActivationCheckpointing, compiled: Container[str]
) -> None:
    """Recompute the named modules' activations in backward: all of them, or all but what the mode keeps.

    Args:
        compiled: the modules whose forward is compiled. In "selective" mode nothing is put around these: the compiler's
            partitioner keeps products and collectives, and computes the rest again (docs/decisions/0024).
    """
    for name in names:
        if section.mode == "full" or name not in compiled:
            wrap_forward(model.get_submodule(name), MODES[section.mode])
