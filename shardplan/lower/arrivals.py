"""What arrives at a module that takes either R or I: what the layout check saw, else from the structure of the plan.

Megatron's scheme has one door per block: inside it values are R, outside I. The one value that leaves a block region
whole and is read by further matrix multiplications is the final norm's; whether it is R or I depends on its readers.
"""

from __future__ import annotations

from shardplan.core.layout import I, Layout, R
from shardplan.core.plan import Assignment, ResolvedPlan
from shardplan.core.tree import ancestors
from shardplan.styles import STYLES, Style


def style_of(assignment: Assignment) -> Style:
    """The record of an assignment's style."""
    return STYLES[assignment.rule.style]


def door_output(assignment: Assignment) -> Layout | None:
    """What a door hands to the inside of its module; None for what is no input door."""
    style = style_of(assignment)
    if not style.is_door or style.inside is None:
        return None
    return I if style.inside == R and assignment.rule.grad == "complete" else style.inside


def _inside_door(plan: ResolvedPlan, name: str) -> Layout | None:
    for ancestor in ancestors(name):
        assignment = plan.modules.get(ancestor)
        inside = door_output(assignment) if assignment else None
        if inside in (R, I):
            return inside
    return None


def free_readers(plan: ResolvedPlan) -> tuple[str, ...]:
    """Modules outside every door that take R: output heads, and the colwise rules of a plan without doors."""
    return tuple(
        name
        for name, assignment in plan.modules.items()
        if style_of(assignment).inside == R
        and I in style_of(assignment).takes
        and not style_of(assignment).is_door
        and _inside_door(plan, name) is None
    )


def gathered(plan: ResolvedPlan, name: str) -> Layout:
    """What `output: gather` hands on at a module: as the rule says, as the layout check found, else R where a head follows
    that takes R, else I."""
    grad = plan.modules[name].rule.grad
    if grad is not None:
        return R if grad == "partial" else I
    if plan.arrivals is not None and name in plan.arrivals:
        return plan.arrivals[name]
    return R if free_readers(plan) else I


def arrives(plan: ResolvedPlan, name: str) -> Layout:
    """Whether R or I arrives at a module that takes both: as the layout check saw, else by the plan's structure."""
    if plan.arrivals is not None and name in plan.arrivals:
        return plan.arrivals[name]
    inside = _inside_door(plan, name)
    if inside is not None:
        return inside
    gathers = [other for other, assignment in plan.modules.items() if assignment.rule.output == "gather"]
    return gathered(plan, gathers[-1]) if gathers else I
