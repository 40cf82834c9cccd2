"""Who refers to a tensor and to its memory: what nobody else can read may be changed in place.

Autograd asks the same before it adds one gradient to another in place, in C++, where no Python object refers to them. How many references
there are in Python where nobody else has one depends on the releases of torch and Python: so they are counted once, where that is known.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardplan.torchlib.private import private

from .later_weights import eager_keeper, of_checkpoint

_count_modes = private("count_dispatch_modes")
_FakeTensor = private("FakeTensor")
_storage_use_count = private("storage_use_count")
_use_count = private("TensorBase")._use_count
References = tuple[int, int, int, int, int]


def references(x: Tensor) -> References:
    """The numbers of references to a tensor, to its storage, and to the tensor that it is a view of; and of Python's to both tensors (0
    where it is no view)."""
    base, storage = x._base, _storage_use_count(x.untyped_storage()._cdata)
    if base is None:
        return _use_count(x), storage, 0, sys.getrefcount(x), 0
    return _use_count(x), storage, _use_count(base), sys.getrefcount(x), sys.getrefcount(base)


def only_gradient(gradient: Tensor) -> bool:
    """Whether nobody else can read a gradient.

    Args:
        gradient: the argument of an autograd function's `backward(ctx, gradient)`, which calls this with nothing else on its stack.
    """
    if torch.compiler.is_compiling():
        return False
    if type(gradient) is not Tensor:
        return isinstance(gradient, _FakeTensor)  # without memory; and a fake mode keeps references too
    return references(gradient) == of_gradient(gradient._base is not None)


def only_output(output: Any) -> bool:
    """Whether nobody else can read the output of a module. To what keeps saved tensors no output is the only one: a selective checkpoint
    runs the module a second time, and compares the operators. A checkpoint without a mode sees none.

    Args:
        output: the argument of a forward hook's `__call__(self, module, args, kwargs, output)`, which calls this.
    """
    if torch.compiler.is_compiling():
        return False
    if (keeper := eager_keeper()) is not None and (_count_modes() or not of_checkpoint(keeper)):
        return False
    if type(output) is not Tensor:
        return isinstance(output, _FakeTensor)
    return references(output) == of_output(output._base is not None)


def _asked(x: Tensor) -> References:
    """One call deeper, as in the two functions above."""
    return references(x)


class _Asks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, found: list[References]) -> Tensor:
        ctx.found = found
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.found.append(_asked(gradient))
        return None, None


@cache
def of_gradient(view: bool) -> References:
    """The references to a product that nobody else refers to, in a backward. Do not call it before a first backward: it starts autograd's
    GPU threads, which forbid some actions after a fork.

    Args:
        view: of its transpose.
    """
    found: list[References] = []
    with torch.inference_mode(False), torch.enable_grad(), private("disable_modes")():
        ones = torch.ones(2, 2, device="cpu")
        seen = _Asks.apply(ones.clone().requires_grad_(), found)
        ((seen.t() if view else seen) @ ones).backward(ones)
    return found[0]


class _Hook:
    def __init__(self) -> None:
        self.found: list[References] = []

    def __call__(self, module: Any, args: tuple, kwargs: dict, output: Any) -> None:
        self.found.append(_asked(output))


@cache
def of_output(view: bool) -> References:
    """The same for a module's output. The hook is called as `nn.Module.__call__` calls one: a module would call the hooks of all modules."""
    hook, result = _Hook(), None

    def called() -> None:
        nonlocal result
        result = torch.empty(2, 2, device="cpu")
        result = result.t() if view else result
        hook(None, (), {}, result)

    with torch.inference_mode(False), private("disable_modes")():
        called()
    return hook.found[0]
