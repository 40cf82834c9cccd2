"""The tensors of a model whose stages are on several ranks; each has one name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardplan.torchlib.gathering import of_all

from .pipelined_model import Pipeline

Described = tuple[int, tuple[str, ...], tuple[int, ...], torch.dtype]  # stage, names, shape, dtype


@dataclass(frozen=True)
class StageTensor:
    """A tensor of the whole model.

    Args:
        names: in the whole model; several for a tied tensor.
        stage: the first stage that has it.
        shape, dtype: of the whole tensor.
        tensor: this rank's, if this rank has that stage.
    """

    names: tuple[str, ...]
    stage: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor: Tensor | None


def stage_tensors(
    pipeline: Pipeline, own: Mapping[int, Sequence[tuple[tuple[str, ...], Tensor]]], ties: Sequence[Sequence[str]]
) -> list[StageTensor]:
    """The tensors of all stages, in the order of stages. A collective over pp.

    Args:
        own: stage -> (names, tensor) of its tensors, for the stages of this rank.
        ties: groups of names of one parameter.
    """
    described: list[Described] = [
        (stage, names, tuple(tensor.shape), tensor.dtype) for stage, found in own.items() for names, tensor in found
    ]
    gathered: list[list[Described]] = of_all(described, pipeline.group)
    here = {(stage, names): tensor for stage, found in own.items() for names, tensor in found}
    tied = {name: tuple(tie) for tie in ties for name in tie}
    made: dict[str, StageTensor] = {}
    for stage, names, shape, dtype in sorted((one for part in gathered for one in part), key=lambda one: one[0]):
        every = tuple(dict.fromkeys(other for name in names for other in tied.get(name, (name,))))
        if not any(name in made for name in every):
            tensor = StageTensor(every, stage, shape, dtype, here.get((stage, names)))
            made |= dict.fromkeys(every, tensor)
    return list(dict.fromkeys(made.values()))


def send_whole(pipeline: Pipeline, one: StageTensor, make: Callable[[], Tensor], *, everywhere: bool) -> Tensor | None:
    """Send a whole tensor to the mesh's first rank or to all ranks. Call it on all ranks.

    Args:
        make: gathers it, on the ranks of its stage.
    """
    layout, group = pipeline.layout, pipeline.group
    owner, rank = layout.owners[one.stage], dist.get_rank(group)
    whole = make() if rank == owner else None
    place = pipeline.device
    if everywhere:
        value = (
            whole.to(place).contiguous() if whole is not None else torch.empty(one.shape, dtype=one.dtype, device=place)
        )
        dist.broadcast(value, group=group, group_src=owner)
        return value
    if owner == 0 or not _first_column(pipeline):
        return whole
    if whole is not None:
        dist.send(whole.to(place).contiguous(), group=group, group_dst=0)
    elif rank == 0:
        whole = torch.empty(one.shape, dtype=one.dtype, device=place)
        dist.recv(whole, group=group, group_src=owner)
    return whole


def _first_column(pipeline: Pipeline) -> bool:
    """Whether this rank is on the pp axis of the mesh's first rank."""
    mesh = pipeline.layout.mesh.within_stage.mesh
    return not any(mesh.get_coordinate() or ())


def in_whole_order(names: Sequence[str], found: Sequence[StageTensor]) -> Iterator[StageTensor]:
    """Tensors in the order of a whole model's names; tensors without such a name come last."""
    place = {name: i for i, name in enumerate(names)}
    yield from sorted(found, key=lambda one: place.get(one.names[0], len(place)))
