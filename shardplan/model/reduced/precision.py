"""Running reduced models in one precision, whatever their code asks for.

A user's model may cast to bfloat16 itself, because its weights are bfloat16. The reduced model has float32 (or float64)
weights, so that roundoff is not mistaken for a wrong layout. Where its forward requests half precision, it gets the
weights' dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

HALF = frozenset((torch.bfloat16, torch.float16))
CASTS = frozenset((Tensor.half, Tensor.bfloat16))


class _Whole(TorchFunctionMode):
    """Replaces half precision by another dtype in every call."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in CASTS:
            return args[0].to(self.dtype)
        return func(*map(self._raised, args), **{name: self._raised(value) for name, value in (kwargs or {}).items()})

    def _raised(self, value: Any) -> Any:
        return self.dtype if isinstance(value, torch.dtype) and value in HALF else value


class _WithoutHalf:
    """A model's forward without half precision."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]):
        self.model, self.forward = model, forward
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        with _Whole(dtype):
            return self.forward(*args, **kwargs)


def without_half(model: nn.Module) -> nn.Module:
    """Make a model's forward use its parameters' dtype wherever it requests bfloat16 or float16."""
    model.forward = _WithoutHalf(model, model.forward)
    return model


def with_half(model: nn.Module) -> nn.Module:
    """Undo `without_half`."""
    if isinstance(model.forward, _WithoutHalf):
        model.forward = model.forward.forward
    return model


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a model's floating-point parameters and buffers, in place. Complex ones stay; `nn.Module.to` would drop their imaginary parts."""
    return model._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """A floating-point tensor in a dtype, also each of a tuple; anything else as it is."""
    if type(value) is tuple:
        return tuple(cast(one, dtype) for one in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
