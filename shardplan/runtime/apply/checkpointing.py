"""Activation checkpointing inside a module's forward: its hooks (block inputs, FSDP2) stay outside and run once."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardplan.core.sections import ActivationCheckpointing
from shardplan.runtime.parallel.direct_calls import same_moves
from shardplan.runtime.parallel.forward import Around, around_of, wrap_forward
from shardplan.runtime.parallel.own_experts import OwnExperts
from shardplan.runtime.parallel.read_once import ReadOnce
from shardplan.runtime.parallel.regime import Regime
from shardplan.runtime.parallel.selective import keep_products

# The arguments of `checkpoint` besides use_reentrant.
MODES: dict[str, dict[str, Any]] = {"full": {}, "selective": {"context_fn": keep_products}}


def _checkpoint(options: dict[str, Any], regime: Regime | None, *, experts: bool) -> Around:
    def around(forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        run = same_moves(forward, regime)
        if experts and not torch.compiler.is_compiling():
            run = ReadOnce(run)
        return checkpoint(run, *args, use_reentrant=False, **options, **kwargs)

    return around


def checkpoint_modules(
    model: nn.Module,
    names: Iterable[str],
    section: ActivationCheckpointing,
    compiled: Container[str],
    regime: Regime | None = None,
) -> None:
    """Recompute the named modules' activations in backward: all of them, or all except those that the mode keeps.

    Args:
        compiled: the modules whose forward is compiled. In "selective" mode these are not wrapped: the compiler's
            partitioner keeps products and collectives, and recomputes the rest (docs/decisions/0017).
        regime: the switches of a model whose parts may run with other moves than the plan's own.
    """
    for name in names:
        if section.mode == "full" or name not in compiled:
            module = model.get_submodule(name)
            experts = any(around_of(one, OwnExperts) for one in module.modules())
            wrap_forward(module, _checkpoint(MODES[section.mode], regime, experts=experts))
