"""The result of typing a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardplan.core.layout import Layout
from shardplan.model.reduced.trace import Place

from .drawing_operands import DrawingOperand
from .finding import Finding
from .mergeable_sums import SeenSum, SharedSum
from .reads import SharedRead


@dataclass(frozen=True)
class Proof:
    """What was found.

    Args:
        findings: in the order of the run.
        incoming: the incoming layout of each module that accepts I and R; of one that gathers its output, the output layout.
        reads: values that several modules move I -> R, each on its own.
        sums: partial sums that are added to each other once each is reduced on its own.
        operations: how many operations were typed.
        doubts: operation -> the operands that would have to have no part in it for its result to be what it seems, of which
            that is not known.
        operands: of each operation that may draw random numbers, and of each layer with adapters, how its operand is spread.
        stopped: at the last of the findings; what comes behind it was not looked at.
        entering: (value, module) for each I that a module moves to R.
        reduced: (value, module) for each partial sum that a module reduces at its output.
        shared_reads: module that moves I -> R -> the one that moved the same tensor before, in every call of their block;
            None for one that did not always find it moved.
        declared: what was seen of each of the plan's `sum_outputs`.
    """

    findings: tuple[Finding, ...]
    incoming: Mapping[str, Layout]
    reads: tuple[SharedRead, ...]
    sums: tuple[SharedSum, ...]
    operations: int
    entering: tuple[tuple[int, str], ...] = ()
    reduced: tuple[tuple[int, str], ...] = ()
    shared_reads: Mapping[str, str | None] = field(default_factory=dict)
    declared: tuple[SeenSum, ...] = ()
    doubts: Mapping[Place, tuple[int, ...]] = field(default_factory=dict)
    operands: tuple[DrawingOperand, ...] = ()
    stopped: bool = False
