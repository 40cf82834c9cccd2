"""The numbers that rules declare exist in the model, and tp divides them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardplan.core.diagnostics import Code, Diagnostic, Edit, Label, Severity
from shardplan.core.expressions import count_of
from shardplan.core.plan import Rule, section_at
from shardplan.language.plan_texts import rule_text
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
    yield from _without_dim(facts)
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
            if isinstance(value, str) and not _is_tensor(facts, assignment.name, path):
                yield DIVIDE, value, rule.stating("shares"), assignment.name
        if style.features.tail is not None and not resolved.tree.count_near(assignment.name, style.features.tail):
            yield (
                NUMBER,
                f"neither the configuration nor a module around has a number {style.features.tail}",
                rule,
                assignment.name,
            )


def _is_tensor(facts: Facts, name: str, path: str) -> bool:
    """Whether a share without a dim names a buffer of a module, or an argument of its forward."""
    module = facts.resolved.tree.modules.get(name)
    return module is not None and path not in module.numbers and path in (*module.buffers, *(module.arguments or ()))


def _without_dim(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for each rule that names a buffer or an argument as if it were a number."""
    tree, seen = facts.resolved.tree, set()
    for name, assignment in facts.resolved.assignments.items():
        rule = assignment.rule
        wrong = [path for path in rule.divided if _is_tensor(facts, name, path)]
        if not wrong or rule.location in seen:
            continue
        seen.add(rule.location)
        module, path, stating = tree.modules[name], wrong[0], rule.stating("shares")
        shape = module.buffers.get(path, ())
        dims = [dim for dim, length in enumerate(shape) if length > 1 and length % (facts.tp or 1) == 0]
        new = replace(
            stating,
            shares=tuple(replace(one, dim=dims[0]) if one.name == path else one for one in stating.shares if dims),
        )
        section = section_at(stating.location.path)
        what = (
            f"a buffer {list(shape)}"
            if shape
            else "a buffer"
            if path in module.buffers
            else "an argument of the forward"
        )
        yield Diagnostic(
            code=DIVIDE,
            severity=Severity.ERROR,
            message=f"`shares` does not fit for {tree.named([name])}: {path} is {what} of {module.class_name}, and no number",
            primary=Label(stating.location),
            help=f"write `shares: {{{path}: {{dim: {dims[0] if dims else 1}}}}}`: the dim that has the heads or features",
            modules=tuple(n for n, a in facts.resolved.assignments.items() if a.rule.location == rule.location),
            proposals=(Edit(section, rule.pattern, rule_text(new), stating.location),) if dims and section else (),
        )


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
