"""The parameters of a planned model, whole, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardplan.model.adapters import unwrapped
from shardplan.runtime.apply.applied import applied
from shardplan.runtime.apply.fsdp2 import reshard
from shardplan.runtime.apply.slices import Packing, gathered, in_original_order
from shardplan.runtime.apply.state import packed_parameters

from .checkpoint_names import without_wrapper


@dataclass(frozen=True)
class _Stored:
    """A parameter as the model stores it."""

    name: str
    parameter: nn.Parameter
    packed: Packing | None


@overload
def full_parameters(model: nn.Module, gradients: Literal[False] = False) -> Iterator[tuple[str, Tensor]]: ...


@overload
def full_parameters(model: nn.Module, gradients: Literal[True]) -> Iterator[tuple[str, Tensor, Tensor | None]]: ...


def full_parameters(
    model: nn.Module, gradients: bool = False
) -> Iterator[tuple[str, Tensor]] | Iterator[tuple[str, Tensor, Tensor | None]]:
    """The parameters of a planned model, whole and with rows in the original order: for the weight updates of an inference
    engine, and for exports. To be called on all ranks, and iterated to the end on all: each parameter is a collective.

    One parameter is gathered at a time, on every rank, on the mesh's device. Names and order are those of
    `named_parameters()` of the unsharded model: a tied parameter comes once, under its first name. Buffers are not among
    them. Where nothing is split, a tensor may share memory with the model: clone what is to be kept.

    Args:
        model: what `apply_plan` returned, with memory, on any mesh.
        gradients: give each parameter's gradient too.

    Returns:
        An iterator of (name, tensor), or of (name, tensor, gradient), where the gradient is None if the parameter has none.
        Tensors are detached, in the dtype of the parameter, and have the shape of the unsharded one.

    Raises:
        ValueError: no plan was applied, or a parameter is on the meta device. It is raised by the call, not by the first
            iteration.
    """
    record, outer = applied(model), without_wrapper(model)
    packings = packed_parameters(record.program) if record.tp > 1 else {}
    reshard(outer)
    packed = {
        id(parameter): packings[name]
        for name, parameter in unwrapped(outer).named_parameters(remove_duplicate=False)
        if name in packings
    }
    stored = [_Stored(name, one, packed.get(id(one))) for name, one in outer.named_parameters()]
    on_meta = next((one.name for one in stored if one.parameter.is_meta), None)
    if on_meta is not None:
        raise ValueError(f"{on_meta} is on the meta device: it has no values")
    return _with_gradients(stored, record.tp) if gradients else _values(stored, record.tp)


def _values(stored: Sequence[_Stored], tp: int) -> Iterator[tuple[str, Tensor]]:
    for one in stored:
        yield one.name, _whole(one.parameter, one.packed, tp)


def _with_gradients(stored: Sequence[_Stored], tp: int) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    for one in stored:
        gradient = one.parameter.grad
        yield (
            one.name,
            _whole(one.parameter, one.packed, tp),
            None if gradient is None else _whole(gradient, one.packed, tp),
        )


@torch.no_grad()
def _whole(tensor: Tensor, packed: Packing | None, tp: int) -> Tensor:
    tensor = tensor.detach()
    return in_original_order(gathered(tensor) if isinstance(tensor, DTensor) else tensor, packed, tp)
