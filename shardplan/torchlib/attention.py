"""Replacing torch's attention function, and which calls of it a chunked sequence allows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import functional as F

SEQUENCE = 2  # the dimension in [batch, heads, sequence, features]

attention = F.scaled_dot_product_attention
_replaced: list[Callable[..., Tensor]] = []


@contextmanager
def attention_replaced(by: Callable[..., Tensor]) -> Iterator[None]:
    """Replace `torch.nn.functional.scaled_dot_product_attention` by a function while the context lasts.

    A mode would not do: backward, and so what activation checkpointing runs again, is called with modes switched off.

    Raises:
        RuntimeError: it is already replaced.
    """
    if F.scaled_dot_product_attention is not attention:
        raise RuntimeError(
            "torch.nn.functional.scaled_dot_product_attention is already replaced: contexts cannot be nested"
        )
    F.scaled_dot_product_attention = _as_function(by)
    _replaced.append(by)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = attention
        _replaced.clear()


def is_attention_replaced() -> bool:
    """Whether such a context lasts."""
    return bool(_replaced)


@functools.cache
def _as_function(by: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function with the name that torch knows; the same one each time, so that compiled code is not compiled again."""

    @functools.wraps(attention)
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
        return by(*args, **kwargs)

    return scaled_dot_product_attention


def misfit(query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool) -> str | None:
    """Why a call is not causal self-attention; None where it is."""
    if attn_mask is not None:
        return "attention with an explicit mask, such as a sliding window or padding"
    if not is_causal or query.shape[SEQUENCE] != key.shape[SEQUENCE]:
        return "attention that is not causal self-attention"
    return None
