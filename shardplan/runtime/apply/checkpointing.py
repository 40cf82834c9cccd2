"""Activation checkpointing inside a module's forward: its hooks (block inputs, FSDP2) stay outside and run once."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardplan.core.sections import ActivationCheckpointing
from shardplan.runtime.parallel.direct_calls import same_moves
from shardplan.runtime.parallel.forward import Around, around_of, wrap_forward
from shardplan.runtime.parallel.own_experts import OwnExperts
from shardplan.runtime.parallel.read_once import ReadOnce
from shardplan.runtime.parallel.regime import Regime
from shardplan.torchlib.private import private

# The results that selective activation checkpointing keeps: those of matrix products and collectives.
_DispatchMode: Any = private("TorchDispatchMode")

# Operators by their names in a dispatch mode. Attention is two matrix products with a softmax between them.
PRODUCTS = frozenset(
    {
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_scaled_mm",
        "_grouped_mm",
        "_scaled_grouped_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",
        "flex_attention",
    }
)
COLLECTIVES = "_c10d_functional"  # their namespace; it includes the wait, which returns the result


def is_kept(operator: Any) -> bool:
    """Whether an operator's result is kept."""
    packet = getattr(operator, "overloadpacket", operator)
    return getattr(operator, "namespace", None) == COLLECTIVES or packet.__name__ in PRODUCTS


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(operator) else CheckpointPolicy.PREFER_RECOMPUTE


class _OfKept(_DispatchMode):
    """One of torch's modes for selective checkpointing, limited to operators whose results are kept. torch's mode counts all operators,
    and fails if the second run has more. The second run may have more: it gathers an FSDP2 unit that was still gathered in the first.

    Args:
        mode: stores results, or returns them.
    """

    def __init__(self, mode: Any):
        super().__init__()
        self.mode = mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # as in torch's modes

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if is_kept(func):
            return self.mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def keep_products() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a checkpoint's two runs (`context_fn`)."""
    first, second = create_selective_checkpoint_contexts(_policy)
    return _OfKept(first), _OfKept(second)


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
