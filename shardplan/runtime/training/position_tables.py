"""Tables that a model makes from positions, for a chunk of the sequence and for all of it."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shardplan.core.context_facts import BATCH, SEQUENCE, PositionTable, TableArgument
from shardplan.torchlib.equality import TOLERANCE, relative_error
from shardplan.torchlib.private import private

_leaves = private("tree_leaves")


@torch.no_grad()
def differing_table(
    model: nn.Module, tables: Iterable[PositionTable], positions: Tensor, chunks: int
) -> tuple[str, int] | None:
    """The first module whose tables for a chunk are not those of the whole sequence, with the number of the chunk. Modules are called
    as they are now, and are afterwards what they were.

    Args:
        positions: [batch, sequence], of the whole sequence.
    """
    by_kind: dict[str, list[PositionTable]] = {}
    for table in tables:
        by_kind.setdefault(table.kind, []).append(table)
    for name, module in model.named_modules():
        for table in by_kind.get(f"{type(module).__module__}.{type(module).__qualname__}", ()):
            whole = _made(module, table, positions)
            for i, own in enumerate(positions.chunk(chunks, 1)):
                if not _alike(_made(module, table, own), whole, i * own.shape[1], own.shape[1]):
                    return name, i
    return None


def _made(module: nn.Module, table: PositionTable, positions: Tensor) -> list[Tensor]:
    given = {x.name: _argument(x, positions) for x in table.arguments}
    made = type(module).forward(_twin(module), **given)  # what it changes of itself is lost
    return [x for x in _leaves(made) if isinstance(x, Tensor)]


def _argument(one: TableArgument, positions: Tensor) -> Any:
    if one.shape is None:
        return one.value
    sizes = {BATCH: positions.shape[0], SEQUENCE: positions.shape[1]}
    shape = [sizes.get(size, size) for size in one.shape]
    source = positions if one.positions else torch.zeros((), device=positions.device)
    return source.expand(shape)


def _twin(module: nn.Module) -> nn.Module:
    """A copy whose buffers, modules and attributes are its own."""
    twin = copy.copy(module)
    for name, value in vars(twin).items():
        if isinstance(value, (dict, list, set)):
            twin.__dict__[name] = copy.copy(value)
    twin.__dict__["_buffers"] = {name: x if x is None else x.clone() for name, x in module._buffers.items()}
    twin.__dict__["_modules"] = {name: x if x is None else _twin(x) for name, x in module._modules.items()}
    return twin


def _alike(made: list[Tensor], whole: list[Tensor], start: int, length: int) -> bool:
    """Whether tables are those of a part of the sequence."""
    return len(made) == len(whole) and all(
        relative_error(x, _part(y, x, start, length)) <= TOLERANCE[torch.float32]
        for x, y in zip(made, whole, strict=True)
    )


def _part(whole: Tensor, made: Tensor, start: int, length: int) -> Tensor:
    """What of a table for the whole sequence a chunk's should be: it is as it is where no dim is the sequence's."""
    dims = [i for i, (a, b) in enumerate(zip(made.shape, whole.shape, strict=False)) if a != b]
    return whole.narrow(dims[0], start, length) if len(dims) == 1 and made.shape[dims[0]] == length else whole
