"""What rules hand on, and what reaches the inside of a door: as far as it is certain from the structure
alone."""

from __future__ import annotations

from shardplan.core.layout import SEQ, I, Layout, R, V
from shardplan.core.plan import Assignment
from shardplan.styles import STYLES

BY_OUTPUT: dict[str, tuple[Layout, ...]] = {"gather": (R, I), "all_reduce": (I,), "reduce_scatter": (V(SEQ),)}


def hands(assignment: Assignment) -> tuple[Layout, ...]:
    """The types that a module's rule may hand on; empty where it hands on what it got."""
    if assignment.rule.output is not None:
        return BY_OUTPUT[assignment.rule.output]
    style = STYLES[assignment.rule.style]
    handed = style.hands or style.computes
    return (handed,) if handed is not None else ()


def inside(assignment: Assignment) -> Layout | None:
    """The type of the argument inside a door; None for what is no input door."""
    style = STYLES[assignment.rule.style]
    if not style.is_door or style.inside is None:
        return None
    return I if style.inside == R and assignment.rule.grad == "complete" else style.inside
