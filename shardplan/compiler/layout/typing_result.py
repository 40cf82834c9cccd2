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
    """The results.

    Args:
        findings: the findings, in the order of the run.
        incoming: the layout that reaches each module that takes I and R; if it gathers its output, the output's.
        reads: values that several modules each move I -> R.
        sums: partial sums that are reduced one by one and then added to each other.
        operations: how many operations were typed.
        doubts: operation -> the operands that must not contribute if its result is what it seems; it is unknown
            whether they do.
        operands: how the operand of each operation that may draw random numbers, and of each layer with adapters, is spread.
        stopped: whether typing ended at the last of the findings; what comes after it was not looked at.
        entering: (value, module) for each I that a module moves to R.
        reduced: (value, module) for each partial sum that a module reduces at its output.
        shared_reads: module that moves I -> R -> the module that moved the same tensor before it, in every call of
            their block; None for a module that did not always find it moved.
        declared: what the run showed of each of the plan's `sum_outputs`.
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
