"""The results that selective activation checkpointing keeps: those of matrix products and collectives."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from shardplan.torchlib.private import private

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
