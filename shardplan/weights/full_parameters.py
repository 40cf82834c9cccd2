"""The parameters and persistent buffers of a planned model, whole, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardplan.model.adapters import unwrapped
from shardplan.runtime.apply.applied import applied
from shardplan.runtime.apply.fsdp2 import reshard
from shardplan.runtime.apply.state import packed_parameters
from shardplan.runtime.parallel.process_groups import named_ranks
from shardplan.runtime.pipeline import Pipeline
from shardplan.torchlib.gathering import of_all

from .checkpoint_names import without_wrapper
from .lazy import Lazy, read
from .model_tensors import ModelTensor, Stored, tensors_of
from .slices_sent import Round, exchange, rounds_of, unit_of
from .whole_tensors import Arrived, WholeTensor, merged, numbers_of, own_of, stored_parts, under_checkpoint_names

Names = Literal["model", "checkpoint"]


@overload
def full_parameters(
    model: nn.Module | Pipeline,
    gradients: Literal[False] = False,
    *,
    names: Names = "model",
    ranks: Sequence[int] | None = None,
) -> Iterator[tuple[str, Tensor]]: ...


@overload
def full_parameters(
    model: nn.Module | Pipeline, gradients: Literal[True]
) -> Iterator[tuple[str, Tensor, Tensor | None]]: ...


def full_parameters(
    model: nn.Module | Pipeline, gradients: bool = False, *, names: Names = "model", ranks: Sequence[int] | None = None
) -> Iterator[tuple[str, Tensor]] | Iterator[tuple[str, Tensor, Tensor | None]]:
    """The whole parameters of a planned model (rows in the original order) and its persistent buffers: for weight updates of an
    inference engine, and for exports. Call it on all ranks, and iterate to the end on all: each parameter is a collective.

    One parameter is gathered at a time, on every rank, on the mesh's device. Names and order are those of
    `named_parameters()` of the unsharded model; a tied parameter comes once, under its first name. Then come the buffers
    that `state_dict()` has, such as the bias that `update_expert_bias` changes, with this rank's values. Where nothing is
    split, a tensor may share memory with the model: clone what you keep.

    Args:
        model: what `apply_plan` returned, with memory, on any mesh.
        gradients: give each parameter's gradient too; a buffer has none.
        names: "checkpoint" gives the names, tensors and order of `save_checkpoint`, which engines load: experts one by one where
            the model has them in a stack, so no rank holds the whole stack.
        ranks: the ranks of the job that get a checkpoint's tensors; None: all. On the others the iterator yields nothing, but must
            still be iterated.

    Returns:
        An iterator of (name, tensor), or of (name, tensor, gradient), where the gradient is None if the parameter has none.
        Tensors are detached, in the dtype of the parameter, and have the shape of the unsharded one.

    Raises:
        ValueError: no plan was applied; a tensor is on the meta device; an argument does not fit. The call raises it, not the first
            iteration.
    """
    if names == "checkpoint":
        if gradients:
            raise ValueError(
                'gradients have the names of the model: write full_parameters(model, gradients=True), without names="checkpoint"'
            )
        return checkpoint_parameters(model, ranks)
    if names != "model" or ranks is not None:
        raise ValueError(
            f'names must be "model" or "checkpoint", and ranks= needs "checkpoint", not names={names!r}, ranks={ranks!r}: write '
            'full_parameters(model, names="checkpoint", ranks=[0])'
        )
    if isinstance(model, Pipeline):
        model.check_finished()
    tensors = tensors_of(model, _stored)
    if not gradients:
        return _values(tensors)
    here = {one.names[0] for one in tensors if one.own is not None and one.own.tensor.grad is not None}
    return _with_gradients(tensors, here.union(*of_all(here, model.group)) if isinstance(model, Pipeline) else here)


def _stored(model: nn.Module) -> list[Stored]:
    record, outer = applied(model), without_wrapper(model)
    packings = packed_parameters(record.program) if record.tp > 1 else {}
    reshard(outer)
    packed = {
        id(parameter): packings[name]
        for name, parameter in unwrapped(outer).named_parameters(remove_duplicate=False)
        if name in packings
    }
    tensors = (*outer.named_parameters(), *_persistent_buffers(outer))
    on_meta = next((name for name, tensor in tensors if tensor.is_meta), None)
    if on_meta is not None:
        raise ValueError(f"{on_meta} is on the meta device: it has no values")
    return [Stored((name,), tensor, packed.get(id(tensor)), record.tp) for name, tensor in tensors]


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that `state_dict()` has, each once. They are whole, even where a rank reads only a share."""
    kept = {
        id(buffer)
        for module in model.modules()
        for leaf, buffer in module._buffers.items()
        if leaf not in module._non_persistent_buffers_set
    }
    yield from ((name, buffer) for name, buffer in model.named_buffers() if id(buffer) in kept)


def _values(tensors: Sequence[ModelTensor]) -> Iterator[Any]:
    for one in tensors:
        yield one.names[0], one.whole(everywhere=True)


def _with_gradients(tensors: Sequence[ModelTensor], having: Collection[str]) -> Iterator[Any]:
    """As `_values`, with each gradient.

    Args:
        having: the names of the tensors that have one.
    """
    for one in tensors:
        value, name = one.whole(everywhere=True), one.names[0]
        yield name, value, one.whole(gradient=True, everywhere=True) if name in having else None


# The tensors of a planned model as a checkpoint has them, whole, one at a time.
def checkpoint_parameters(model: nn.Module | Pipeline, ranks: Sequence[int] | None) -> Iterator[tuple[str, Tensor]]:
    """`full_parameters(names="checkpoint")`: the same results and errors."""
    mesh = applied(model).mesh.mesh
    members = mesh.mesh.flatten().tolist()
    chosen = members if ranks is None else [*ranks]
    if others := set(chosen) - set(members):
        raise ValueError(f"{named_ranks(others, ('is', 'are'))} not on the model's mesh: choose from ranks={members}")
    own, inner = own_of(model), stored_parts(model)[0].inner
    group = None
    if len(members) != dist.get_world_size():
        group = dist.new_group(members, use_local_synchronization=True)
    wholes, arrived = merged(of_all([one.described for one in own], group)), Arrived()
    sources = under_checkpoint_names(wholes, arrived, inner, tied=False)
    number = numbers_of(wholes)
    held = {number[one.names[0]]: one for one in own}
    receivers = [members.index(rank) for rank in dict.fromkeys(chosen)]
    place = torch.device(mesh.device_type)

    def send(one: Round) -> None:
        exchange(one, lambda key, box: held[key].take(box), arrived, place, group)

    return _received(sources, wholes, arrived, receivers, members.index(dist.get_rank()), send, place)


@torch.no_grad()
def _received(
    sources: Mapping[str, Lazy],
    wholes: Sequence[WholeTensor],
    arrived: Arrived,
    receivers: Sequence[int],
    rank: int,
    send: Callable[[Round], None],
    place: torch.device,
) -> Iterator[tuple[str, Tensor]]:
    for name, source in sources.items():
        whole = torch.empty(source.shape, dtype=source.dtype, device="meta")
        wants = arrived.wanted(partial(read, source, whole))
        asked = {receiver: [unit_of(wants, wholes, receiver, receiver)] for receiver in receivers}
        for one in rounds_of(asked, rank, source.numel() * source.dtype.itemsize):
            send(one)
        if rank in receivers:
            value = torch.empty(source.shape, dtype=source.dtype, device=place)
            read(source, value)
            arrived.boxes.clear()
            yield name, value
