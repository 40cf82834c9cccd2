"""Tried changes, as edits of a plan's text."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.diagnostics import Edit, Location
from shardplan.core.plan import ResolvedPlan, Rule, section_at
from shardplan.language.globs import parse_glob

from .repairs import OURS, Repair, written


def edits_of(plan: ResolvedPlan, repair: Repair | None) -> tuple[Edit, ...]:
    """The edits of a plan that have the effect of a change to its bound rules; empty where no edit of one rule has it.

    Args:
        plan: the plan, bound to the reduced model, as the change is.
    """
    made = [_edit(plan, one.placed) for one in (repair.changes if repair is not None else ())]
    edits = tuple(edit for edit in made if edit is not None)
    return edits if len(edits) == len(made) else ()


def _edit(plan: ResolvedPlan, repair: Repair) -> Edit | None:
    old, new = repair.old, repair.new
    value = written(new) if new is not None else None
    if old is None or old.location == OURS or section_at(old.location.path) != repair.section:
        return None if value is None else Edit(repair.section, repair.pattern, value)
    kept = _kept(plan, old, set(repair.names))
    if kept is None and value is None:
        return None
    return Edit(
        repair.section,
        repair.pattern,
        _with_flags(value, old),
        Location(old.location.file, old.location.path),
        kept or (),
        override=kept is None or old.override,
    )


def _with_flags(value: str | None, old: Rule) -> str | None:
    """The text of the new rule; it may match nothing if the old rule may."""
    if value is None or not old.optional:
        return value
    inner = value[1:-1] if value.startswith("{") else f"style: {value}"
    return f"{{{inner}, optional: true}}"


def _kept(plan: ResolvedPlan, old: Rule, changed: set[str]) -> tuple[str, ...] | None:
    """The alternatives of a rule's pattern that reach only unchanged names; None if one reaches changed and unchanged names."""
    reached = [*_reached(plan, old)]
    if any(names & changed and names - changed for _, names in reached):
        return None
    return tuple(text for text, names in reached if not names & changed)


def _reached(plan: ResolvedPlan, rule: Rule) -> Iterator[tuple[str, set[str]]]:
    """Each alternative of a rule's pattern, with the matching names to which the rule applies."""
    acting = ((name, one) for name, a in plan.assignments.items() for one in (a.rule, a.rule.under) if one is not None)
    own = [name for name, one in acting if one.location == rule.location]
    for text in parse_glob(rule.pattern).texts:
        one = parse_glob(text)
        yield text, {name for name in own if one.matches(plan.tree.address(name))}
