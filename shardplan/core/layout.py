"""The layout of a value and of its gradient on one axis of the mesh.

Four types suffice for an axis (the operators f and g of Megatron-LM, arXiv 1909.08053, are I -> R and P -> I;
sequence parallelism, arXiv 2205.05198, adds V):

| type | the value on each rank | its gradient on each rank |
|---|---|---|
| I | equal on all ranks | equal on all ranks, complete |
| R | equal on all ranks | a partial sum |
| V(d) | this rank's slice of dim d | this rank's slice of dim d |
| V(d)/r | a slice of dim d, the same on r neighbouring ranks | a partial sum over these ranks |
| P | a partial sum | equal on all ranks, complete |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .mesh import Axis

LayoutKind = Literal["I", "R", "V", "P"]
SEQ: Literal["seq"] = "seq"  # the sequence dimension: 1 in [batch, sequence, hidden], or the rule's `seq_dim`


@dataclass(frozen=True, slots=True)
class Layout:
    """One of I, R, V(dim), P on an axis. `dim` counts as in torch; -1 is the feature dimension, SEQ the sequence.

    Args:
        copies: the number of neighbouring ranks that have each slice of a V (key-value heads shared by several ranks).
            Above 1, its gradient is a partial sum over them. A slice that is on all ranks is R.
    """

    kind: LayoutKind
    dim: int | Literal["seq"] | None = None
    axis: Axis = Axis.TP
    copies: int = 1

    def __post_init__(self) -> None:
        assert (self.dim is not None) == (self.kind == "V"), self
        assert self.copies == 1 or (self.copies > 1 and self.kind == "V"), self

    def __str__(self) -> str:
        copies = f"/{self.copies}" if self.copies > 1 else ""
        return f"V({self.dim}){copies}" if self.kind == "V" else self.kind

    def at(self, seq_dim: int) -> Layout:
        """The same layout with SEQ replaced by a number."""
        return replace(self, dim=seq_dim) if self.dim == SEQ else self

    def on(self, axis: Axis) -> Layout:
        """The same layout on another axis of the mesh."""
        return replace(self, axis=axis)

    def split_dim(self, ndim: int) -> int:
        """The dim (from 0) that a V splits of a value with `ndim` dims; SEQ must have been replaced."""
        assert isinstance(self.dim, int), self
        return self.dim % ndim

    @property
    def gradient(self) -> Layout:
        """The layout of the gradient, read as a value: I <-> I, R <-> P, V <-> V."""
        kinds: dict[LayoutKind, LayoutKind] = {"R": "P", "P": "I"}
        return replace(self, kind=kinds.get(self.kind, self.kind))


I = Layout("I")  # noqa: E741 - the literature's name
R = Layout("R")
P = Layout("P")


def V(dim: int | Literal["seq"]) -> Layout:  # noqa: N802 - the literature's name
    return Layout("V", dim)


def over_features(operand: Sequence[int], argument: Sequence[int], *, grouped: bool) -> bool:
    """Whether the last dim of an operation's operand has the features of its module's first argument. This is so if
    both have one shape or, if features are grouped, if the operand has one more dim for the groups."""
    return tuple(operand) == tuple(argument) or (grouped and tuple(operand) == (*argument[:-1], 1, argument[-1]))


def in_one_row(argument: Sequence[int] | None, output: Sequence[int], layout: Layout) -> tuple[int, int] | None:
    """The sizes of batch and sequence, if a module's output has the tokens of its argument in one row ([batch * sequence, hidden] for [batch,
    sequence, hidden], as experts may return them); None for any other. A slice of the sequence is then a slice of each sequence in the batch.

    Args:
        argument: the shape that the module's forward reads.
        output: the shape that it returns.
        layout: the output's.
    """
    if argument is None or layout.kind != "V" or layout.dim != 1 or (len(argument), len(output)) != (3, 2):
        return None
    batch, length, _ = argument
    return (batch, length) if output[0] == batch * length else None
