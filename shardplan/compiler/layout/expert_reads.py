"""Distributed stacks of experts that code outside of their module reads. They are DTensors there, also at tp 1, where
no run of a rank is typed."""

from __future__ import annotations

from collections.abc import Iterable

from shardplan.core.diagnostics import Diagnostic
from shardplan.core.plan import ResolvedPlan
from shardplan.core.tree import ancestors
from shardplan.model.reduced.trace import Event
from shardplan.styles.bound import bound_modules

from .finding import Finding, Operand
from .layout_diagnostics import diagnostic
from .run import RecordedModel


def outside_findings(plan: ResolvedPlan, recorded_models: Iterable[RecordedModel]) -> tuple[Diagnostic, ...]:
    """One finding for each pair of a place in the code and a parameter, in the names of the reduced model.

    Args:
        plan: the plan, bound to the reduced model.
    """
    distributed = {name for name, one in bound_modules(plan).items() if one.experts is not None}
    found: dict[tuple[str, str], dict[str, Finding]] = {}
    for recorded in recorded_models:
        for event in recorded.reference.events:
            for number in event.inputs if event.kind == "op" else ():
                if (owner := _stack_outside(plan, recorded, event, number, distributed)) is not None:
                    one = _finding(recorded, event, number, owner)
                    place = plan.tree.pattern(one.module), plan.tree.pattern(one.subject)
                    found.setdefault(place, {}).setdefault(one.subject, one)
    return tuple(
        diagnostic(plan, tuple(layers.values()), None, plan.modules[next(iter(layers.values())).operands[0].maker])
        for layers in found.values()
    )


def _stack_outside(
    plan: ResolvedPlan, recorded: RecordedModel, event: Event, number: int, distributed: set[str]
) -> str | None:
    """The module of experts that has a value as a parameter, if code outside of this module reads it."""
    name = recorded.reference.parameters.get(number)
    if name is None:
        return None
    module, _ = plan.tree.parameters[name]
    owner = next((one for one in (module.name, *ancestors(module.name)) if one in distributed), None)
    return None if owner in (None, event.module, *ancestors(event.module)) else owner


def _finding(recorded: RecordedModel, event: Event, number: int, owner: str) -> Finding:
    run = recorded.reference
    name, shape, trained = run.parameters[number], tuple(run.values[number].shape), run.requires_grad[number]
    operand = Operand(number, name, owner, shape, "I" if trained else "whole", trained)
    return Finding("outside", event.module, name, event.name, event.source, (operand,))
