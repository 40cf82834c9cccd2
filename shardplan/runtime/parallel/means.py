"""Means over features that are split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from shardplan.core.layout import P, R, over_features
from shardplan.core.module_program import FeatureMeans
from shardplan.torchlib.rms_norms import RMS_NORMS, rms_norm

from .tensor_moves import move

MEANS = (torch.mean, Tensor.mean)


class Means:
    """Wraps a norm's forward: its own code runs, but each mean of its first argument over all features of this rank becomes
    the mean over the features of all ranks of the mesh. (The means of a value that was first reshaped into groups stay local.)

    Args:
        program: has the number of features on all these ranks.
        meshes: the meshes of these ranks, one for each axis.
    """

    def __init__(self, program: FeatureMeans, *meshes: DeviceMesh):
        self.program, self.meshes = program, meshes

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        x = args[0] if args else next(iter(kwargs.values()))
        with _OverAllRanks(x.shape, self.program, self.meshes):
            return forward(*args, **kwargs)


class _OverAllRanks(TorchFunctionMode):
    def __init__(self, shape: torch.Size, program: FeatureMeans, meshes: Sequence[DeviceMesh]):
        super().__init__()
        self.shape, self.program, self.meshes = shape, program, meshes

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in RMS_NORMS:  # its mean is inside
            return rms_norm(self._mean, *args, **kwargs)
        result = func(*args, **kwargs)
        if func not in MEANS:
            return result
        x = args[0] if args else kwargs["input"]
        if not over_features(x.shape, self.shape, grouped=self.program.grouped) or not _reads_last(x, args, kwargs):
            return result
        return self._over_all(result, x)

    def _mean(self, squares: Tensor) -> Tensor:
        return self._over_all(squares.mean(-1, keepdim=True), squares)

    def _over_all(self, mean: Tensor, x: Tensor) -> Tensor:
        mean = mean * (x.shape[-1] / self.program.features)
        for mesh in self.meshes:
            mean = move(mean, mesh, P, R)
        return mean


def _reads_last(x: Tensor, args: tuple, kwargs: dict) -> bool:
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if dims is None:
        return True
    last = (-1, x.ndim - 1)
    return any(dim in last for dim in dims) if isinstance(dims, (tuple, list)) else dims in last
