"""Modes of torch: some for running reduced models, whatever modes the caller uses and whatever the model compiles; and one
that keeps kernels from ending the process."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from .private import private

_weight_norm = private("weight_norm")
CHECKED = frozenset((torch.nn.functional.scaled_dot_product_attention, _weight_norm))


def uncompiled() -> AbstractContextManager[None]:
    """While active, code that a model compiles (`torch.compile`) runs uncompiled: Dynamo would trace the modes that
    observe its operations."""
    # Importing Dynamo takes a second, so it is not imported if nothing was compiled.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def reduced_runs() -> Iterator[None]:
    """The mode for running reduced models. The caller's dispatch modes (a fake or simulated tensor mode, a default device)
    are off: tensors made inside are real, and on the CPU unless the code says otherwise. Operators run in one thread: if
    other programs use the cores, waiting for a second thread costs ten times as much as products of a few rows.
    """
    # A device as context intercepts every torch call, which takes a third of the layout check's time: only where it is needed.
    on_cpu = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with private("disable_modes")(), on_cpu, uncompiled():
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def meshes_made_once() -> Iterator[None]:
    """While active, FSDP2 makes the joint mesh of its own axes and tp once for all parameters on the same two meshes. To make it
    for each parameter takes longer than all other work on that parameter."""
    kind = private("DeviceMesh")
    make, made = kind._concatenate, {}

    def concatenate(meshes: list[Any]) -> Any:
        key = tuple(map(id, meshes))
        if key not in made:
            made[key] = meshes, make(meshes)  # keeping the meshes keeps their ids unique
        return made[key][1]

    with patch.object(kind, "_concatenate", staticmethod(concatenate)):
        yield


def check_sizes(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Check what a torch function's CPU kernel does not check, before it is called. torch's attention divides by the number
    of heads, and a rank may have none; weight_norm reads past the end of a norm of another size. Both end the process.

    Raises:
        ValueError: the sizes do not fit.
    """
    if func is torch.nn.functional.scaled_dot_product_attention:
        empty = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and not x.numel()), None)
        if empty is not None:
            raise ValueError(
                f"attention receives an empty tensor {list(empty.shape)}: this rank has no heads or tokens left"
            )
    elif func is _weight_norm:
        v, g, dim = (*args, *kwargs.values(), 0)[:3]
        needed = [] if dim == -1 else [size if i == dim else 1 for i, size in enumerate(v.shape)]  # -1: one norm of all
        if list(g.shape) != needed:
            raise ValueError(
                f"weight_norm of a weight {list(v.shape)} in dim {dim} needs a norm {needed}, which is {list(g.shape)}"
            )


class CheckedSizes(TorchFunctionMode):
    """While active, `check_sizes` is called before each function of torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in CHECKED:
            check_sizes(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)
