"""Causal attention over a sequence, with one chunk on every rank of an axis."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardplan.core.layout import R, V
from shardplan.torchlib.attention import SEQUENCE, attention, misfit

from .tensor_moves import move


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
                f"context parallelism does not support {reason}: pass no attention_mask, use_cache=False, and at least two "
                "tokens for each rank"
            )
        chunk, rank = query.shape[SEQUENCE], self.mesh.get_local_rank()
        end = (rank + 1) * chunk  # what comes after is not read
        keys, values = (move(x, self.mesh, V(SEQUENCE), R).narrow(SEQUENCE, 0, end) for x in (key, value))
        mask = torch.ones(chunk, end, dtype=torch.bool, device=query.device).tril(rank * chunk)
        return attention(query, keys, values, mask, dropout_p, **options)


@functools.cache
def context_attention(mesh: DeviceMesh) -> ContextAttention:
    """The attention over an axis; one for each, as compiled code holds it."""
    return ContextAttention(mesh)
