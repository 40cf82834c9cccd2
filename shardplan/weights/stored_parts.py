"""A rank's parts of a model, their tensors, and which indices of each whole tensor it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardplan.runtime.apply.applied import applied
from shardplan.runtime.apply.slices import Packing
from shardplan.runtime.apply.state import packed_parameters
from shardplan.runtime.pipeline import Pipeline

from .checkpoint_names import StateEntry, inner_model, state_entries
from .ranges import Ranges, own_ranges


@dataclass(frozen=True)
class StoredPart:
    """A model, or a part of one.

    Args:
        outer: as `apply_plan` returned it.
        inner: without wrappers.
        elsewhere: the tensors of other parts, by name, without memory.
        ties: the names of each parameter of the whole model that has several.
    """

    outer: nn.Module
    inner: nn.Module
    packed: Mapping[str, Packing]
    elsewhere: Mapping[str, Tensor] = field(default_factory=dict)
    ties: tuple[tuple[str, ...], ...] = ()

    @property
    def entries(self) -> list[StateEntry]:
        """The part's tensors, each under all its names in the whole model; its own name comes first."""
        other = {name: tie for tie in self.ties for name in tie}
        return [
            StateEntry(
                tuple(dict.fromkeys((*e.names, *(n for name in e.names for n in other.get(name, ()))))), e.tensor
            )
            for e in state_entries(self.inner)
        ]


def part_of(part: nn.Module, model: nn.Module | Pipeline) -> StoredPart:
    record, inner = applied(part), inner_model(part)
    packed = packed_parameters(record.program) if record.tp > 1 else {}
    if not isinstance(model, Pipeline):
        return StoredPart(part, inner, packed)
    return StoredPart(part, inner, packed, model.state, model.ties)


def ranges_of(entry: StateEntry, packed: Mapping[str, Packing], rank: int | None = None) -> tuple[Ranges, ...]:
    if not isinstance(entry.tensor, DTensor):
        return tuple(((0, size),) if size else () for size in entry.tensor.shape)
    return own_ranges(entry.tensor, next((packed[name] for name in entry.names if name in packed), None), rank)
