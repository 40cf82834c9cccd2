"""The floating-point operations of one operator, as torch's own counter counts them; causal attention counts half."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

# Attention: (name of the operator, position of its query, position of its flag `is_causal`, number of its [queries, keys]
# products; backward computes the probabilities again). torch's counter does not know the first two, nor causal ones.
ATTENTION = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (0, 4, 2),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (1, 7, 5),
    "aten::_scaled_dot_product_efficient_attention": (0, 6, 2),
    "aten::_scaled_dot_product_efficient_attention_backward": (1, 11, 5),
}
GROUPED = "aten::_grouped_mm"


def counted(func: Any) -> bool:
    """Whether an operator is a matrix product, a convolution or attention."""
    name = func.name()
    return name.partition(".")[0] in ATTENTION or name == GROUPED or func.overloadpacket in flop_registry


def flops_of(func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> tuple[str, int] | None:
    """(dtype, operations) for matrix products, convolutions and attention; None for all other operators."""
    if (attention := ATTENTION.get(func.name().partition(".")[0])) is not None:
        query_at, causal_at, products = attention
        query, key, value = args[query_at : query_at + 3]
        causal = args[causal_at] if len(args) > causal_at else kwargs.get("is_causal", False)
        return _dtype(query), products * _attention_product(query, key, value) // (2 if causal else 1)
    if func.name() == GROUPED:
        return _dtype(args[0]), _grouped(args[0], args[1])
    formula = flop_registry.get(func.overloadpacket)
    if formula is None:
        return None
    first = next(x for x in args if isinstance(x, Tensor))
    return _dtype(first), int(formula(*args, **kwargs, out_val=out))


def _attention_product(query: Tensor, key: Tensor, value: Tensor) -> int:
    """The operations of one product over [batch, heads, queries, keys], with the mean of the key's and the value's width."""
    batch, heads, queries, width = query.shape
    return batch * heads * queries * key.shape[2] * (width + value.shape[-1])


def _grouped(left: Tensor, right: Tensor) -> int:
    """The operations of products [rows, inner] x [inner, columns]: the groups split one size, or have a product each."""
    groups = left.shape[0] if left.ndim == right.ndim == 3 else 1
    return 2 * groups * left.shape[-2] * left.shape[-1] * right.shape[-1]


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
