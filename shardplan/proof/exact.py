"""Running a model in float64 from end to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shardplan.runtime.apply.model_parts import Parted
from shardplan.torchlib.modes import CHECKED, CheckedSizes, check_sizes
from shardplan.torchlib.private import private

LOWER = frozenset((torch.float32, torch.bfloat16, torch.float16))
CASTS = frozenset((Tensor.float, Tensor.half, Tensor.bfloat16))
GROUPED = frozenset(("grouped_mm", "_grouped_mm"))  # names of one function
STARTS = frozenset((Tensor.backward, torch.autograd.backward, torch.autograd.grad))


class _Doubled(TorchFunctionMode):
    """Replaces lower precisions by float64 in every call, also in calls of a backward. Sizes are checked as by `CheckedSizes`."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in CHECKED:
            check_sizes(func, args, kwargs or {})
        if _AS_WRITTEN:
            return func(*args, **(kwargs or {}))
        if func in STARTS:
            if func is Tensor.backward:
                func, args, kwargs = torch.autograd.backward, _of_backward(*args, **(kwargs or {})), None
            return _started_under(self, func)(*args, **(kwargs or {}))
        if func in CASTS:
            func = Tensor.double
        if getattr(func, "__name__", "") in GROUPED:
            func = _grouped_mm
        if torch.dtype in map(type, args):
            args = tuple(map(_raised, args))
        if not kwargs:
            return func(*args)
        return func(*args, **{name: _raised(value) for name, value in kwargs.items()})


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, **options: Any) -> Tensor:
    """`F.grouped_mm` of rows [rows, in] by a stack of matrices [groups, in, out]: torch 2.13 has none of float64.

    Args:
        offs: where each group's rows end.
    """
    if offs is None or a.ndim != 2 or b.ndim != 3:
        return F.grouped_mm(a, b, offs=offs, **options)
    ends = offs.tolist()
    rows = [a[first:end] @ b[i] for i, (first, end) in enumerate(zip([0, *ends], ends, strict=False))]
    return torch.cat([*rows, a.new_zeros(a.shape[0] - ends[-1], b.shape[2])])


_AS_WRITTEN: list[None] = []  # one entry for each running call that keeps its own precisions


def as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, run with the precisions of its code; for kernels that only take float32."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        _AS_WRITTEN.append(None)
        try:
            return function(*args, **kwargs)
        finally:
            _AS_WRITTEN.pop()

    return run


def _of_backward(
    tensor: Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> tuple:
    """The arguments of `torch.autograd.backward`, from those of `Tensor.backward`."""
    return tensor, gradient, retain_graph, create_graph, None, inputs


def _started_under(mode: TorchFunctionMode, function: Any) -> Callable[..., Any]:
    """A copy of a function of torch.autograd that starts the engine while the mode is active. Torch leaves a mode before it calls the
    function, but the engine keeps the modes of its start for everything that it calls: hooks, backwards in Python, the recomputation of
    a checkpoint. It is a copy because ranks that are threads share torch's own function. It finds itself by its name, as it passes
    itself to the other active modes."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return private("run_backward")(*args, **kwargs)

    names = {**function.__globals__, "_engine_run_backward": run}
    copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    names[function.__name__] = copied
    return copied


def _raised(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in LOWER else value


@contextmanager
def in_precision_of(model: nn.Module | Parted) -> Iterator[None]:
    """Keep a float64 model's own casts to float32 (norms, routers, softmax, the loss) in float64 while it runs. These
    casts would leave float32 roundoff in a run that must tell roundoff from a wrong layout. Other models run
    unchanged."""
    if not _in_float64(model):
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Doubled():
            yield
    finally:
        torch.set_default_dtype(before)


def checked_sizes(model: nn.Module | Parted) -> AbstractContextManager[Any]:
    """`CheckedSizes` around runs `in_precision_of` a model: a second mode would cost as much as the first."""
    return nullcontext() if _in_float64(model) else CheckedSizes()


def _in_float64(model: nn.Module | Parted) -> bool:
    return all(p.dtype == torch.float64 for p in model.parameters() if p.is_floating_point())
