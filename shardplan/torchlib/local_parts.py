"""From DTensors to plain tensors."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def to_local_if_dtensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; a plain tensor is returned unchanged. Gradients pass through; inside
    `torch.no_grad()` the result shares the DTensor's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
