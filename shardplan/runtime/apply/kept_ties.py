"""Tied parameters: one Parameter before, one Parameter after."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

from shardplan.core.by_key import by_key
from shardplan.core.tree import parent


def tied_groups(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The names of parameters that are the same object."""
    names = by_key((id(parameter), name) for name, parameter in model.named_parameters(remove_duplicate=False))
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def restore_ties(model: nn.Module, groups: tuple[tuple[str, ...], ...]) -> None:
    """Make each group one Parameter again: `parallelize_module` replaced its members separately."""
    for first, *others in groups:
        kept = model.get_parameter(first)
        for name in others:
            owner, leaf = model.get_submodule(parent(name)), name.rpartition(".")[2]
            replaced = owner._parameters[leaf]
            if isinstance(kept, DTensor):
                assert isinstance(replaced, DTensor) and kept.placements == replaced.placements, (first, name)
            owner._parameters[leaf] = kept
