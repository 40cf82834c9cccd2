"""Means over features of which every rank has some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from shardplan.core.layout import P, R

from .moves import move

MEANS = (torch.mean, Tensor.mean)


class Means:
    """Around a norm's forward: its own code runs, and each mean that it takes over the last dim of its shard is that over all
    ranks' features.

    Args:
        features: their number on all ranks.
    """

    def __init__(self, features: int, mesh: DeviceMesh):
        self.features, self.mesh = features, mesh

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        with _OverAllRanks(self.features, self.mesh):
            return forward(*args, **kwargs)


class _OverAllRanks(TorchFunctionMode):
    def __init__(self, features: int, mesh: DeviceMesh):
        super().__init__()
        self.features, self.mesh = features, mesh

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in MEANS and _reads_last(args[0] if args else kwargs["input"], args, kwargs):
            x = args[0] if args else kwargs["input"]
            return move(result * (x.shape[-1] / self.features), self.mesh, P, R)
        return result


def _reads_last(x: Tensor, args: tuple, kwargs: dict) -> bool:
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if dims is None:
        return True
    last = (-1, x.ndim - 1)
    return any(dim in last for dim in dims) if isinstance(dims, (tuple, list)) else dims in last
