"""Gradients that a parameter may keep, because nothing else shares their memory.

Autograd adds the next backward's gradient to `.grad` in place. So it keeps a gradient that nothing else refers to, and copies any other.
It checks only the tensor that it gets. A DTensor made in a backward is always new, even if its local tensor is also another parameter's
gradient: for `cls_token + position` both would share one `.grad`, and a second backward would be added to it twice. In that case the
local tensor is copied before it becomes a DTensor, as autograd does (torch/csrc/autograd/functions/accumulate_grad.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardplan.torchlib.operators import ADD_, DETACH
from shardplan.torchlib.private import private

from .references import of_gradient, references

_FakeTensor = private("FakeTensor")
_new = DTensor.__new__  # its __init__ does nothing, slowly


def own_gradients(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of a backward, each with its own memory: copied where another tensor has the same memory.

    Two tensors with one memory are two references to its storage; only one tensor that is the gradient of several has to be looked for.
    """
    own = list(gradients)
    several = _several([id(gradient) for gradient in gradients if gradient is not None])
    for i, gradient in enumerate(gradients):
        if gradient is None:
            continue
        if type(gradient) is not Tensor and isinstance(gradient, _FakeTensor):  # the first question is the cheaper one
            return _own_fakes(gradients)
        to_tensor, to_storage, to_base, *_ = references(gradient)
        tensor, storage, base, *_ = of_gradient(gradient._base is not None)
        if id(gradient) in several or to_tensor > tensor or to_storage > storage or to_base > base:
            own[i] = gradient.clone()
    return own


def _own_fakes(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The same for tensors without values (`estimate`): references are not counted, because a fake mode keeps references too."""
    storages = [0 if g is None else g.untyped_storage()._cdata for g in gradients]
    several = _several([storage for storage in storages if storage])
    return [g.clone() if g is not None and at in several else g for g, at in zip(gradients, storages, strict=True)]


def _several(keys: list[int]) -> set[int]:
    """Those that are there more than once."""
    return set() if len(set(keys)) == len(keys) else {key for key in keys if keys.count(key) > 1}


class _Given(DTensor):
    """A gradient on its way to its parameter. Autograd keeps what `detach` of it returns, and nothing else has it: so it is itself a DTensor
    from then on. The `detach` of a DTensor makes another one, and costs the host more than twice as much, for every parameter in every
    step. A later backward's is added to the first one's, shard to shard: DTensor takes 20 times as long to find this out. All else is
    DTensor's."""

    __slots__ = ()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is DETACH and type(args[0]) is cls:
            gradient: Any = args[0]
            gradient.__class__ = DTensor
            return gradient
        if func is ADD_ and not kwargs and type(args[0]) is DTensor and args[0]._spec is args[1]._spec:
            args[0]._local_tensor.add_(args[1]._local_tensor)
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def given(gradient: Tensor, spec: Any, local: Tensor) -> DTensor:
    """A parameter's gradient as autograd gets it.

    Args:
        gradient: of the local tensor.
        spec, local: the parameter's.
    """
    if not gradient.is_contiguous() and gradient.stride() != local.stride():
        gradient = gradient.contiguous()
    return _new(_Given, gradient, spec, requires_grad=False)
