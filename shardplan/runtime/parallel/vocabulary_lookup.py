"""Look-up in a table whose rows are split over the ranks (Megatron-LM's vocabulary-parallel embedding)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .chunks import chunk_size
from .tensor_moves import scale_gradient


class VocabularyLookup:
    """Wraps an embedding's forward: ids of other ranks' rows give zero vectors, so the sum over the ranks is the
    looked-up vectors.

    `padding_idx` is a row of the whole table. Its gradient is cut here, since on local rows it would be another row. So are gradients divided
    by how often a row is looked up (`scale_grad_by_freq`): ids of other ranks' rows would count as look-ups of the first row.
    """

    def __init__(self, rows: int, mesh: DeviceMesh):
        self.rows, self.chunk = rows, chunk_size(rows, mesh.size())
        self.mesh = mesh

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Tensor:
        ids = args[0] if args else kwargs["input"]
        local = ids - self.mesh.get_local_rank() * self.chunk
        on_other_rank = (local < 0) | (local >= self.chunk)
        options = {name: module.__dict__[name] for name in ("padding_idx", "scale_grad_by_freq")}
        padding_idx = options["padding_idx"]
        try:
            module.__dict__.update(padding_idx=None, scale_grad_by_freq=False)
            vectors = forward(local.masked_fill(on_other_rank, 0))
        finally:
            module.__dict__.update(options)
        vectors = vectors.masked_fill(on_other_rank.unsqueeze(-1), 0)
        if padding_idx is not None:
            vectors = torch.where((ids == padding_idx).unsqueeze(-1), vectors.detach(), vectors)
        if options["scale_grad_by_freq"]:
            counts = ids.new_zeros(self.rows).index_add(0, ids.flatten(), torch.ones_like(ids).flatten())
            vectors = scale_gradient(vectors, counts[ids].to(vectors.dtype).reciprocal().unsqueeze(-1))
        return vectors
