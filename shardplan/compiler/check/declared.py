"""The numbers that rules declare exist in the model, and tp divides them."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity
from shardplan.core.expressions import count_of
from shardplan.core.plan import Rule
from shardplan.styles.divided_numbers import attribute
from shardplan.styles.packed_lengths import packed_parts

from .check_words import by_rule, sizes
from .facts import Facts

PARTS = Code("SP304")
DIVIDES = Code("SP305")
DIVIDE = Code("SP306")
NUMBER = Code("SP308")

DECLARED = ("declared", "attribute")


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for each rule and reason."""
    yield from by_rule(_problems(facts), _words)
    if facts.tp is not None:
        yield from _indivisible(facts, facts.tp)


def _problems(facts: Facts) -> Iterator[tuple[Code, str, Rule, str]]:
    """(code, reason, rule, module or parameter) of every number that is missing or does not add up."""
    resolved = facts.resolved
    for stored in facts.splits:
        parts = packed_parts(stored.rule, stored.size, resolved.tree.numbers) if stored.placement.packed else ()
        if isinstance(parts, str):
            yield from ((PARTS, parts, stored.rule, name) for name in stored.assigned)
    for assignment in resolved.assignments.values():
        rule, style = assignment.rule, facts.style(assignment)
        for expression in rule.divides:
            value: int | str | None = count_of(expression, resolved.tree.numbers)
            if isinstance(value, str):
                yield DIVIDES, value, rule.stating("divides"), assignment.name
        for path in rule.divided:
            value = attribute(resolved, assignment, path)
            if isinstance(value, str):
                yield DIVIDE, value, rule.stating("shares"), assignment.name
        if style.features.tail is not None and not isinstance(resolved.tree.numbers.get(style.features.tail), int):
            yield NUMBER, f"the configuration has no number {style.features.tail}", rule, assignment.name


def _words(code: Code, rule: Rule) -> tuple[str, str]:
    """The problem, and the help."""
    return {
        PARTS: (
            "`packed` does not fit",
            "give the length of each part, in the order in which the parts are stored",
        ),
        DIVIDES: ("`divides` has no value", "name a number of the model's configuration"),
        DIVIDE: (
            "`shares` does not fit",
            "name a number that the module's instance or its config has",
        ),
        NUMBER: (f"`{rule.style}` needs a number", "use this style only for models that have this number"),
    }[code]


def _indivisible(facts: Facts, tp: int) -> Iterator[Diagnostic]:
    # These are reported with the splits.
    seen = {r.count for r in facts.requirements if r.kind not in DECLARED and not r.allows(tp)}
    for requirement in facts.requirements:
        if requirement.kind in DECLARED and not requirement.allows(tp) and requirement.count not in seen:
            code, field = (DIVIDES, "divides") if requirement.kind == "declared" else (DIVIDE, "shares")
            yield Diagnostic(
                code=code,
                severity=Severity.ERROR,
                message=f"{requirement.what} is {requirement.count}, which tp={tp} does not divide",
                primary=Label(requirement.rule.stating(field).location, f"declares `{field}`"),
                help=sizes(facts.allowed),
                modules=requirement.modules,
            )
