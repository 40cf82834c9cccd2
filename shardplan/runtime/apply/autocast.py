"""The model's forward under torch.autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardplan.core.dtypes import dtype_name
from shardplan.core.sections import DataParallel
from shardplan.runtime.parallel.forward import wrap_forward

ALLOWED = ("bfloat16", "float16")


def read_dtype(dtype: torch.dtype | str | None, section: DataParallel | None) -> torch.dtype | None:
    """The requested dtype.

    Raises:
        ValueError: autocast does not support it, or it differs from `mixed_precision.param` of the section.
    """
    if dtype is None:
        return None
    found: torch.dtype = getattr(torch, dtype_name(dtype, "autocast_dtype", ALLOWED))
    param = section.mixed_precision.param if section is not None and section.mixed_precision else None
    if param is not None and getattr(torch, param) is not found:
        raise ValueError(
            f"autocast_dtype is {found}, but the plan's mixed_precision computes in {param}: specify one of them"
        )
    return found


def autocast_forward(model: nn.Module, device: str, dtype: torch.dtype) -> None:
    """Run the model's forward in torch.autocast.

    Args:
        device: the type of the mesh's devices.
    """

    def around(forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        with torch.autocast(device, dtype):
            return forward(*args, **kwargs)

    wrap_forward(model, around)
