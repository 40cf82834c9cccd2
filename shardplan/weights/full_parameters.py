"""The parameters and persistent buffers of a planned model, whole, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardplan.model.adapters import unwrapped
from shardplan.runtime.apply.applied import applied
from shardplan.runtime.apply.fsdp2 import reshard
from shardplan.runtime.apply.slices import Packing, gathered, in_original_order
from shardplan.runtime.apply.state import packed_parameters
from shardplan.runtime.parallel.process_groups import named_ranks
from shardplan.runtime.pipeline import Pipeline
from shardplan.runtime.pipeline.stage_tensors import StageTensor, in_whole_order, send_whole, stage_tensors
from shardplan.torchlib.gathering import of_all

from .checkpoint_names import without_wrapper
from .lazy import Lazy, read
from .slices_sent import Round, exchange, rounds_of, unit_of
from .whole_tensors import Arrived, WholeTensor, merged, numbers_of, own_of, stored_parts, under_checkpoint_names

Names = Literal["model", "checkpoint"]


@dataclass(frozen=True)
class _Stored:
    """A parameter or buffer as the model stores it."""

    name: str
    tensor: Tensor
    packed: Packing | None


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
        return _of_stages(model, gradients)
    stored, record = _stored(model), applied(model)
    return _with_gradients(stored, record.tp) if gradients else _values(stored, record.tp)


def _stored(model: nn.Module) -> list[_Stored]:
    record, outer = applied(model), without_wrapper(model)
    packings = packed_parameters(record.program) if record.tp > 1 else {}
    reshard(outer)
    packed = {
        id(parameter): packings[name]
        for name, parameter in unwrapped(outer).named_parameters(remove_duplicate=False)
        if name in packings
    }
    parameters = [_Stored(name, one, packed.get(id(one))) for name, one in outer.named_parameters()]
    stored = [*parameters, *(_Stored(name, one, None) for name, one in _persistent_buffers(outer))]
    on_meta = next((one.name for one in stored if one.tensor.is_meta), None)
    if on_meta is not None:
        raise ValueError(f"{on_meta} is on the meta device: it has no values")
    return stored


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that `state_dict()` has, each once. They are whole, even where a rank reads only a share."""
    kept = {
        id(buffer)
        for module in model.modules()
        for leaf, buffer in module._buffers.items()
        if leaf not in module._non_persistent_buffers_set
    }
    yield from ((name, buffer) for name, buffer in model.named_buffers() if id(buffer) in kept)


def _of_stages(
    pipeline: Pipeline, gradients: bool
) -> Iterator[tuple[str, Tensor]] | Iterator[tuple[str, Tensor, Tensor | None]]:
    """`full_parameters` for pipeline stages: the ranks of a stage gather each of its parameters, and send it to the other stages."""
    pipeline.check_finished()
    found = {stage: _stored(part) for stage, part in pipeline.by_stage.items()}
    tensors = stage_tensors(
        pipeline,
        {stage: [((one.name,), one.tensor) for one in rows] for stage, rows in found.items()},
        pipeline.ties,
    )
    here = {id(one.tensor): one for rows in found.values() for one in rows}
    present = of_all({one.name: one.tensor.grad is not None for one in here.values()}, pipeline.group)
    has = {name for part in present for name, there in part.items() if there}
    return _sent(pipeline, tensors, here, has if gradients else None)


def _sent(
    pipeline: Pipeline, tensors: Sequence[StageTensor], here: Mapping[int, _Stored], gradients: set[str] | None
) -> Iterator[Any]:
    tp = applied(pipeline).tp
    for one in in_whole_order(pipeline.names, tensors):
        own = here.get(id(one.tensor))
        value = send_whole(pipeline, one, partial(_own_whole, own, False, tp), everywhere=True)
        if gradients is None:
            yield one.names[0], value
        elif one.names[0] in gradients:
            yield one.names[0], value, send_whole(pipeline, one, partial(_own_whole, own, True, tp), everywhere=True)
        else:
            yield one.names[0], value, None


def _own_whole(own: _Stored | None, gradient: bool, tp: int) -> Tensor:
    assert own is not None
    tensor = own.tensor.grad if gradient else own.tensor
    assert tensor is not None
    return _whole(tensor, own.packed, tp)


def _values(stored: Sequence[_Stored], tp: int) -> Iterator[tuple[str, Tensor]]:
    for one in stored:
        yield one.name, _whole(one.tensor, one.packed, tp)


def _with_gradients(stored: Sequence[_Stored], tp: int) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    for one in stored:
        gradient = one.tensor.grad
        yield (
            one.name,
            _whole(one.tensor, one.packed, tp),
            None if gradient is None else _whole(gradient, one.packed, tp),
        )


@torch.no_grad()
def _whole(tensor: Tensor, packed: Packing | None, tp: int) -> Tensor:
    tensor = tensor.detach()
    return in_original_order(gathered(tensor) if isinstance(tensor, DTensor) else tensor, packed, tp)


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
