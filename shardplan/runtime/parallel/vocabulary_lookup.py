"""Look-up in a table whose rows are split over the ranks (Megatron-LM's vocabulary-parallel embedding)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .chunks import chunk_size


class VocabularyLookup:
    """Wraps an embedding's forward: ids of other ranks' rows give zero vectors, so the sum over the ranks is the
    looked-up vectors.

    `padding_idx` is a row of the whole table. Its gradient is cut here, since on local rows it would be another row.
    """

    def __init__(self, rows: int, mesh: DeviceMesh):
        self.chunk = chunk_size(rows, mesh.size())
        self.mesh = mesh

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Tensor:
        ids = args[0] if args else kwargs["input"]
        local = ids - self.mesh.get_local_rank() * self.chunk
        on_other_rank = (local < 0) | (local >= self.chunk)
        padding_idx = module.__dict__["padding_idx"]
        try:
            module.__dict__["padding_idx"] = None
            vectors = forward(local.masked_fill(on_other_rank, 0))
        finally:
            module.__dict__["padding_idx"] = padding_idx
        vectors = vectors.masked_fill(on_other_rank.unsqueeze(-1), 0)
        if padding_idx is not None:
            vectors = torch.where((ids == padding_idx).unsqueeze(-1), vectors.detach(), vectors)
        return vectors
