"""A tensor with the shape of a whole value; only a rank's slice of it exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PRODUCTS = (torch.mul, Tensor.mul, torch.multiply, Tensor.multiply)
FACTORIES = (Tensor.new_empty, Tensor.new_full, Tensor.new_ones, Tensor.new_tensor, Tensor.new_zeros)


class Hollow(Tensor):
    """Replaces a module's argument for code that asks for its shape, dtype or device. It has no values and no memory.
    Computing with it raises, except for operations that can run on the slice instead: a product with a whole value,
    which is then sliced too, and a change of dtype. Their result is again hollow.

    Args:
        kept: the slice.
        shape: that of the whole value.
        cut: slices a value that has the whole dim.
        refused: name of a function that computes with it -> the message of the error.
    """

    kept: Tensor
    _cut: Callable[[Tensor], Tensor]
    _refused: Callable[[str], str]

    @staticmethod
    def __new__(
        cls, kept: Tensor, shape: torch.Size, cut: Callable[[Tensor], Tensor], refused: Callable[[str], str]
    ) -> Hollow:
        one = Tensor._make_wrapper_subclass(cls, shape, dtype=kept.dtype, device=kept.device)
        one.kept, one._cut, one._refused = kept, cut, refused
        return one

    def _of(self, kept: Tensor) -> Hollow:
        return Hollow(kept, self.shape, self._cut, self._refused)

    def _times(self, other: Any) -> Hollow | None:
        """The product with a number, or with a tensor that broadcasts to the whole value's shape; None for any other value."""
        if not isinstance(other, Tensor):
            return self._of(self.kept * other)
        if isinstance(other, Hollow) or other.ndim > self.ndim:
            return None
        if torch.broadcast_shapes(self.shape, other.shape) != self.shape:
            return None
        return self._of(self.kept * self._cut(other.expand((*self.shape[:-1], other.shape[-1] if other.ndim else 1))))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in PRODUCTS and not kwargs and len(args) == 2:
            one, other = args if isinstance(args[0], Hollow) else args[::-1]
            if (product := one._times(other)) is not None:
                return product
        if func in FACTORIES and isinstance(args[0], Hollow):  # they read its dtype and device
            return func(args[0].kept.detach(), *args[1:], **(kwargs or {}))
        if func is Tensor.to and isinstance(args[0], Hollow):
            kept = args[0].kept.to(*args[1:], **(kwargs or {}))
            return args[0] if kept is args[0].kept else args[0]._of(kept)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod  # torch declares it without the class, as it calls it
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        one = next(x for x in _flat((args, kwargs or {})) if isinstance(x, Hollow))
        raise RuntimeError(one._refused(str(func).removeprefix("aten.").partition(".")[0]))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch declares no type
        return f"Hollow({list(self.shape)}, {self.dtype})"


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    return [leaf for one in value for leaf in _flat(one)] if isinstance(value, (tuple, list)) else [value]
