"""What runs of a reduced model in chunks of the sequence show of a model."""

from __future__ import annotations

from dataclasses import dataclass

BATCH, SEQUENCE = -1, -2  # in place of the sizes that are those of the batch
Plain = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class TableArgument:
    """One argument of a call.

    Args:
        shape: of a tensor.
        positions: whether the tensor has the position of each token.
        value: of what is no tensor.
    """

    name: str
    shape: tuple[int, ...] | None = None
    positions: bool = False
    value: Plain = None


@dataclass(frozen=True, slots=True)
class PositionTable:
    """A module without parameters that makes tensors from positions, such as the tables of a rotary embedding.

    Args:
        kind: its class, with the module that it is from.
        arguments: of one call.
    """

    kind: str
    arguments: tuple[TableArgument, ...]


@dataclass(frozen=True, slots=True)
class ContextFacts:
    """A model in chunks of the sequence.

    Args:
        tables: what it makes from positions.
        loss: why the mean of the losses of chunks is not the loss of the whole sequence; None where it is.
    """

    tables: tuple[PositionTable, ...] = ()
    loss: str | None = None
