"""Runs in float64 from end to end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

LOWER = frozenset((torch.float32, torch.bfloat16, torch.float16))
CASTS = frozenset((Tensor.float, Tensor.half, Tensor.bfloat16))


class _Doubled(TorchFunctionMode):
    """Replaces lower precisions by float64 in every call."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in CASTS:
            func = Tensor.double
        return func(*map(_raised, args), **{name: _raised(value) for name, value in (kwargs or {}).items()})


def _raised(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in LOWER else value


@contextmanager
def in_precision_of(model: nn.Module) -> Iterator[None]:
    """While a float64 model runs, its own casts to float32 (norms, routers, softmax, the loss) stay in float64: such a
    cast would leave float32 roundoff in a run that must distinguish roundoff from a wrong layout. Other models run
    unchanged."""
    if any(p.dtype != torch.float64 for p in model.parameters() if p.is_floating_point()):
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Doubled():
            yield
    finally:
        torch.set_default_dtype(before)
