"""Causal attention over a sequence of which every rank of an axis holds one chunk."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from shardplan.core.layout import R, V

from .moves import move

SEQUENCE = 2  # the dimension in [batch, heads, sequence, features]

_attention = F.scaled_dot_product_attention


@contextmanager
def attention_replaced(by: Callable[..., Tensor]) -> Iterator[None]:
    """Put a function in the place of `torch.nn.functional.scaled_dot_product_attention` while the context lasts.

    A mode would not do: backward, and so what activation checkpointing runs again, is called with modes switched off.

    Raises:
        RuntimeError: it is replaced already.
    """
    if F.scaled_dot_product_attention is not _attention:
        raise RuntimeError(
            "torch.nn.functional.scaled_dot_product_attention is replaced already: contexts are not nested"
        )
    F.scaled_dot_product_attention = _as_function(by)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = _attention


@functools.cache
def _as_function(by: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function with the name that torch knows; the same one each time, so that compiled code is not compiled again."""

    @functools.wraps(_attention)
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
        return by(*args, **kwargs)

    return scaled_dot_product_attention


def misfit(query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool) -> str | None:
    """Why a call of attention is not the causal one of a sequence to itself."""
    if attn_mask is not None:
        return "attention with a mask of its own, such as a sliding window or padding"
    if not is_causal or query.shape[SEQUENCE] != key.shape[SEQUENCE]:
        return "attention that is not causal, or not of a sequence to itself"
    return None


class ContextAttention:
    """Attention in which queries stay where they are, and keys and values are gathered over the axis; their gradients, of
    which every rank has a part, are reduced and scattered. Chunks are contiguous: rank r has the r-th.

    Args:
        mesh: the one-dimensional cp mesh.
    """

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh
        self.ran = False

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        self.ran = True
        if (reason := misfit(query, key, attn_mask, is_causal)) is not None:
            raise ValueError(
                f"context parallelism met {reason}: give no attention_mask, use_cache=False, and at least two tokens for "
                "each rank"
            )
        chunk, rank = query.shape[SEQUENCE], self.mesh.get_local_rank()
        end = (rank + 1) * chunk  # what comes after is not read
        keys, values = (move(x, self.mesh, V(SEQUENCE), R).narrow(SEQUENCE, 0, end) for x in (key, value))
        mask = torch.ones(chunk, end, dtype=torch.bool, device=query.device).tril(rank * chunk)
        return _attention(query, keys, values, mask, dropout_p, **options)


@functools.cache
def context_attention(mesh: DeviceMesh) -> ContextAttention:
    """The attention over an axis; one for each, as compiled code holds it."""
    return ContextAttention(mesh)
