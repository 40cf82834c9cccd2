"""NeMo-RL's norms of gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardplan.runtime import training

Parameters = Tensor | Iterable[Tensor]


def get_grad_norm(
    parameters: Parameters,
    dp_cp_group: ProcessGroup | None = None,
    tp_group: ProcessGroup | None = None,
    norm_type: float = 2,
    dtype: torch.dtype = torch.float32,
    *,
    dp_group: ProcessGroup | None = None,
) -> float:
    """`shardplan.runtime.training.get_grad_norm` as a number.

    Args:
        dp_group, dp_cp_group, tp_group: not needed: with the parameters' placements, each element counts once.
        dtype: must be float32, in which the norm is computed; gradients in float64 stay float64.

    Raises:
        ValueError: another dtype.
    """
    _check_dtype(dtype)
    return training.get_grad_norm(parameters, norm_type=norm_type).item()


def clip_grad_by_total_norm_(
    parameters: Parameters, max_grad_norm: float, total_norm: Tensor | float, dtype: torch.dtype = torch.float32
) -> None:
    """`shardplan.runtime.training.clip_grad_by_total_norm_`.

    Args:
        dtype: must be float32; gradients are scaled in place, in their own dtype.

    Raises:
        ValueError: another dtype.
    """
    _check_dtype(dtype)
    training.clip_grad_by_total_norm_(parameters, max_grad_norm, total_norm)


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype is not torch.float32:
        raise ValueError(
            f"dtype must be torch.float32, not {dtype}: norms are computed in it, or in float64 of such gradients"
        )
