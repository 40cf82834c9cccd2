"""The modules of `sum_outputs` compute partial sums, and all are reduced to the same layout."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity
from shardplan.core.layout import Layout, P
from shardplan.core.sum_outputs import SumRule
from shardplan.core.tree import named

from .facts import Facts

NO_SUM = Code("SP365")


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for each rule and reason."""
    without: dict[SumRule, list[str]] = {}
    apart: dict[SumRule, list[str]] = {}
    for one in facts.resolved.sums:
        found = {name: _reduced_to(facts, name) for name in one.members}
        if missing := [name for name, layout in found.items() if layout is None]:
            without.setdefault(one.rule, []).extend(missing)
        elif len(set(found.values())) > 1:
            apart.setdefault(one.rule, []).extend(one.members)
    for rule, names in without.items():
        yield _finding(rule, f"no partial sum is reduced at {named(tuple(names))}", names)
    for rule, names in apart.items():
        yield _finding(rule, f"{named(tuple(names))} are reduced to different layouts", names)


def _reduced_to(facts: Facts, name: str) -> Layout | None:
    """The layout to which a module reduces its partial sum; None if it computes none."""
    assignment = facts.resolved.modules.get(name)
    if assignment is None or facts.style(assignment).lookup is not None:
        return None
    output = facts.boundaries[name].at(assignment.rule.seq_dim).output
    reduced = output is not None and output.source == P and output.destination.kind in "IV"
    return output.destination if output is not None and reduced else None


def _finding(rule: SumRule, message: str, names: list[str]) -> Diagnostic:
    return Diagnostic(
        code=NO_SUM,
        severity=Severity.ERROR,
        message=message,
        primary=Label(rule.location, "declares their sum"),
        help="give each module a style that reduces a partial sum, or remove it from `sum_outputs`; `sum_outputs: []` "
        "under `sequence_parallel` removes the list there",
        modules=tuple(names),
    )
