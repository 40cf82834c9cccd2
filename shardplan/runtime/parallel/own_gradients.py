"""Gradients that a parameter may keep: their memory is nobody else's.

Autograd adds the next step's gradient into `.grad` in place, so it takes over a gradient that nothing else holds and copies any other.
It looks at the tensor that it is given. A DTensor made in a backward is new each time, and hides that its local tensor is the
gradient of another parameter too: of `cls_token + position`, both would share one `.grad`, and a second backward would be added to it twice.
Where that is, the local tensor is copied before it becomes a DTensor, as autograd does (torch/csrc/autograd/functions/accumulate_grad.h).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from shardplan.torchlib.private import private

_FakeTensor = private("FakeTensor")
_storage_use_count = private("storage_use_count")
_use_count = private("TensorBase")._use_count

# References to a gradient that nobody else holds, while a backward in Python looks at it.
_TENSOR = 1
_STORAGE = 2  # of the tensor, and of the storage object that is asked
_BASE = 2  # of its view, and of the Python object that is asked


def own_gradients(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients that a backward got, each with memory of its own: copied where another tensor has the same.

    Without values (`estimate`), what holds them is not counted: a fake mode keeps references of its own.
    """
    times = Counter(g.untyped_storage()._cdata for g in gradients if g is not None)
    return [g if g is None or _alone(g, times) else g.clone() for g in gradients]


def _alone(gradient: Tensor, times: Counter[int]) -> bool:
    storage = gradient.untyped_storage()._cdata
    if times[storage] > 1:
        return False
    if isinstance(gradient, _FakeTensor):
        return True
    base = gradient._base
    of_storage = _STORAGE if base is None else _STORAGE + 1
    return (
        _use_count(gradient) == _TENSOR
        and _storage_use_count(storage) <= of_storage
        and (base is None or _use_count(base) <= _BASE)
    )
