"""The findings of the proof, before they are put into words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardplan.model.reduced.trace import SourceLine

Kind = Literal[
    "partial",  # the gradient of a whole value is a partial sum, but treated as complete
    "complete",  # the gradient of a whole parameter is complete, but declared a partial sum
    "meeting",  # a value with a complete gradient meets one with a partial gradient
    "arrival",  # the input of a module does not fit its style
    "result",  # what a module computes does not fit its style
    "sum",  # an operation on a partial sum whose results do not add up
    "slices",  # an operation on slices whose results are not slices of the whole result
    "output",  # what the model returns is not whole with a complete gradient
    "untyped",  # a value that could not be compared
    "outside",  # a parameter is read by another module than its own, where it is a DTensor
    "crash",  # the sharded model raises
]


AS_BEFORE = ", as in an earlier call"  # ends the words for a layout that a module must get again


@dataclass(frozen=True, slots=True)
class Operand:
    """A value that an operation reads.

    Args:
        number: the value's number in the run of the first rank.
        parameter: its full name, if it is one.
        maker: the module whose result it is, or in whose forward it was made.
        shape: its shape on this rank.
        layout: I, R, V(d), P, or "whole" (no gradient), "?" (unknown).
        differentiable: whether it requires a gradient.
        from_modules: the modules with parameters or a boundary that it comes from, the nearest first.
    """

    number: int
    parameter: str | None
    maker: str
    shape: tuple[int, ...]
    layout: str
    differentiable: bool
    from_modules: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.parameter or (self.from_modules or (self.maker,))[0] or 'the model'}: {self.layout} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that the proof found.

    Args:
        kind: one of the kinds above.
        module: the module in whose forward, or at whose boundary, it happens.
        subject: a parameter's full name or a module's name.
        operation: the torch function, if it is one.
        source: the line of the model's code.
        operands: the values that it reads.
        actual, wanted: the layouts at a boundary.
        message: the message of an exception.
        mask: the line of a mask that is alike everywhere in the model's own run, where it was found with another one.
        follows: whether it concerns a value that an earlier finding concerns.
        at: the number of operations typed before it.
    """

    kind: Kind
    module: str
    subject: str
    operation: str = ""
    source: SourceLine | None = None
    operands: tuple[Operand, ...] = ()
    actual: str = ""
    wanted: str = ""
    message: str = ""
    mask: SourceLine | None = None
    follows: bool = False
    at: int = 0
