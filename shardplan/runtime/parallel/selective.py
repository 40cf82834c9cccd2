"""Which results selective activation checkpointing keeps: those of matrix products and of collectives."""

from __future__ import annotations

from typing import Any

from torch.utils.checkpoint import CheckpointPolicy

# Operators by the name that a dispatch mode sees. Attention is two matrix products and a softmax between them.
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
COLLECTIVES = "_c10d_functional"  # the namespace; with the wait for a result, which is the result


def is_kept(operator: Any) -> bool:
    """Whether an operator's result is kept."""
    packet = getattr(operator, "overloadpacket", operator)
    return getattr(operator, "namespace", None) == COLLECTIVES or packet.__name__ in PRODUCTS


def keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy for `create_selective_checkpoint_contexts`."""
    return CheckpointPolicy.MUST_SAVE if is_kept(operator) else CheckpointPolicy.PREFER_RECOMPUTE
