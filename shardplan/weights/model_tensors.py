"""The tensors of a planned model, in one part or in stages on several ranks: each has one name, and is gathered when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardplan.runtime.apply.slices import Packing, gathered, in_original_order
from shardplan.runtime.pipeline import Pipeline
from shardplan.torchlib.gathering import of_all

Described = tuple[int, tuple[str, ...], tuple[int, ...], torch.dtype]  # stage, names, shape, dtype


@dataclass(frozen=True, eq=False)
class Stored:
    """A parameter or buffer as a part of a model stores it.

    Args:
        names: in the part; several for a tied tensor.
        packed: how it is packed, if it is.
        tp: the size of the tp axis.
    """

    names: tuple[str, ...]
    tensor: Tensor
    packed: Packing | None
    tp: int

    @torch.no_grad()
    def whole(self, *, gradient: bool) -> Tensor:
        """The tensor, or its gradient, with rows in the original order. A collective for a DTensor."""
        value = self.tensor.grad if gradient else self.tensor
        assert value is not None, self.names
        value = value.detach()
        return in_original_order(gathered(value) if isinstance(value, DTensor) else value, self.packed, self.tp)


@dataclass(frozen=True, eq=False)
class ModelTensor:
    """A tensor of the whole model.

    Args:
        names: in the whole model; several for a tied tensor.
        shape, dtype: of the whole tensor.
        own: this rank's, if this rank has its stage.
        stage: the first stage that has it.
        pipeline: the model, if it is in stages.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    own: Stored | None
    stage: int = 0
    pipeline: Pipeline | None = None

    def whole(self, *, gradient: bool = False, everywhere: bool) -> Tensor | None:
        """The whole tensor, or its gradient, on all ranks or at least on the mesh's first rank. Call it on all ranks."""
        if self.pipeline is None:
            assert self.own is not None, self.names
            return self.own.whole(gradient=gradient)
        layout, group, place = self.pipeline.layout, self.pipeline.group, self.pipeline.device
        owner, rank = layout.owners[self.stage], dist.get_rank(group)
        whole = None
        if rank == owner:
            assert self.own is not None, self.names
            whole = self.own.whole(gradient=gradient)
        if everywhere:
            value = torch.empty(self.shape, dtype=self.dtype, device=place) if whole is None else whole.to(place)
            value = value.contiguous()
            dist.broadcast(value, group=group, group_src=owner)
            return value
        if owner == 0 or not _first_column(self.pipeline):
            return whole
        if whole is not None:
            dist.send(whole.to(place).contiguous(), group=group, group_dst=0)
        elif rank == 0:
            whole = torch.empty(self.shape, dtype=self.dtype, device=place)
            dist.recv(whole, group=group, group_src=owner)
        return whole


def _first_column(pipeline: Pipeline) -> bool:
    """Whether this rank is on the pp axis of the mesh's first rank."""
    mesh = pipeline.layout.mesh.within_stage.mesh
    return not any(mesh.get_coordinate() or ())


def tensors_of(model: nn.Module | Pipeline, stored: Callable[[nn.Module], Sequence[Stored]]) -> list[ModelTensor]:
    """The tensors of a model. Those of stages are in the order of the whole model's names, others come last; this is a collective over pp.

    Args:
        stored: the tensors of the model, or of a part of it, in order.
    """
    if not isinstance(model, Pipeline):
        return [ModelTensor(one.names, tuple(one.tensor.shape), one.tensor.dtype, one) for one in stored(model)]
    here = {(stage, one.names): one for stage, part in model.by_stage.items() for one in stored(part)}
    described: list[Described] = [
        (stage, names, tuple(one.tensor.shape), one.tensor.dtype) for (stage, names), one in here.items()
    ]
    of_ranks: list[list[Described]] = of_all(described, model.group)
    tied = {name: tie for tie in model.ties for name in tie}
    made: dict[str, ModelTensor] = {}
    for stage, names, shape, dtype in sorted((one for rank in of_ranks for one in rank), key=lambda one: one[0]):
        every = tuple(dict.fromkeys(other for name in names for other in tied.get(name, (name,))))
        if not any(name in made for name in every):
            tensor = ModelTensor(every, shape, dtype, here.get((stage, names)), stage, model)
            made |= dict.fromkeys(every, tensor)
    place = {name: i for i, name in enumerate(model.names)}
    return sorted(dict.fromkeys(made.values()), key=lambda one: place.get(one.names[0], len(place)))
