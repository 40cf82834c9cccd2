"""The heads, groups and attributes that rules declare fit the model: each has a value, divides what it counts, and
equals the module's own."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.diagnostics import Code, Diagnostic
from shardplan.core.expressions import EvaluationError, count_of, evaluate, parse_expression
from shardplan.core.plan import Assignment, Rule
from shardplan.core.shares import Share
from shardplan.core.tree import is_count
from shardplan.styles.divided_numbers import attribute, group_length, group_number, mean_ranks
from shardplan.styles.head_counts import number_or_none
from shardplan.styles.packed_lengths import packed_parts
from shardplan.styles.tensor_shares import Misfit, tensor_share

from .check_words import by_rule, sizes
from .facts import Facts
from .stored_by_rules import StoredParameter

HEADS = Code("SP313")
SETTING = Code("SP314")

WORDS = {
    HEADS: (
        "what the rule counts does not fit",
        "name numbers of the model's configuration that divide what they count",
    ),
    SETTING: (
        "`shares` does not fit",
        "write an expression over the module's own numbers with the value that the module has",
    ),
}


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for each rule and reason."""
    shares = [(a, misfit) for a in facts.resolved.assignments.values() for misfit in _of_shares(facts, a)]
    uneven = [(HEADS, m.reason, a.rule.stating("shares"), a.name) for a, m in shares if m.uneven]
    others = [(HEADS, m.reason, a.rule.stating("shares"), a.name) for a, m in shares if not m.uneven]
    yield from by_rule([*_problems(facts), *others], lambda code, rule: WORDS[code])
    yield from by_rule(uneven, lambda code, rule: (WORDS[code][0], sizes(facts.allowed)))


def _problems(facts: Facts) -> Iterator[tuple[Code, str, Rule, str]]:
    for stored in facts.splits:
        for reason in _of_heads(facts, stored):
            yield from ((HEADS, reason, stored.rule.stating("heads"), name) for name in stored.assigned)
    for assignment in facts.resolved.assignments.values():
        for reason in _of_settings(facts, assignment):
            yield SETTING, reason, assignment.rule.stating("shares"), assignment.name


def _of_heads(facts: Facts, stored: StoredParameter) -> Iterator[str]:
    rule, numbers = stored.rule, facts.resolved.tree.numbers
    parts = (
        packed_parts(stored.rule, stored.size, facts.resolved.tree.numbers)
        if stored.placement.packed
        else (stored.size,)
    )
    if isinstance(parts, str):  # compiler/check/declared.py reports it
        return
    if rule.heads and len(rule.heads) != len(parts):
        yield f"`heads` has {len(rule.heads)} numbers for {len(parts)} parts"
        return
    counted = list(zip(rule.heads, parts, strict=True)) if rule.heads else []
    if rule.groups is not None:
        counted.append((rule.groups, stored.size))
    for expression, length in counted:
        count = count_of(expression, numbers)
        if isinstance(count, str):
            yield count
        elif length % count:
            yield f"{expression} is {count}, which does not divide {length} features"


def _of_shares(facts: Facts, assignment: Assignment) -> Iterator[Misfit]:
    rule, resolved = assignment.rule, facts.resolved
    names = [one.name for one in rule.shares]
    yield from (Misfit(f"{name} has two shares") for name in dict.fromkeys(names) if names.count(name) > 1)
    if len(counts := dict.fromkeys(one.groups for one in rule.shares if one.groups is not None)) > 1:
        yield Misfit(f"a norm has one number of groups, not {' and '.join(counts)}")
    module = resolved.tree.modules.get(assignment.name)
    if assignment.is_parameter or module is None:
        yield from (
            Misfit("a parameter has no arguments and no buffers") for one in rule.shares[:1] if one.dim is not None
        )
        return
    for one in rule.shares:
        if one.dim is None:
            yield from map(Misfit, _of_groups(facts, assignment, one))
        elif isinstance(found := tensor_share(resolved, module, one), Misfit):
            yield found


def _of_groups(facts: Facts, assignment: Assignment, one: Share) -> Iterator[str]:
    """Why it is wrong or unclear what a norm's number counts. A number without a value is reported elsewhere."""
    number = attribute(facts.resolved, assignment, one.name)
    count = number_or_none(one.groups, facts.resolved.tree.numbers) if one.groups is not None else None
    if count is None or not isinstance(number, int):
        return
    if group_number(facts.resolved, assignment, one.name) is None:
        yield f"{one.name} is {number}, which is neither {count}, the number of groups, nor the number of features in a group"
        return
    module = facts.resolved.tree.modules[assignment.name]
    ranks, over = facts.tp or 1, mean_ranks(facts.resolved, assignment.rule)
    if number == count == group_length(facts.resolved, module, assignment.rule) and over * over != ranks:
        yield (
            f"{one.name} is {number}, which is both the number of groups and the number of features in a group, and the two are "
            f"divided differently: write `shares: {one.name}` if it is the number of groups, and no share if it is the number of "
            "features"
        )


def _of_settings(facts: Facts, assignment: Assignment) -> Iterator[str]:
    values = [(one.name, one.value) for one in assignment.rule.shares if one.value is not None]
    if not values:
        return
    if assignment.is_parameter:
        yield "a parameter has no attributes"
        return
    module = facts.resolved.tree.modules[assignment.name]
    on_a_rank = dict(module.numbers)
    for path in assignment.rule.divided:
        if is_count(number := on_a_rank.get(path)):
            on_a_rank[path] = max(1, int(number) // (facts.tp or 1))
    for name, expression in values:
        own = module.numbers.get(name)
        if not isinstance(own, int):
            yield f"{module.class_name} has no whole number {name}"
            continue
        try:
            parsed = parse_expression(expression)
            value = evaluate(parsed, module.numbers)
            evaluate(parsed, on_a_rank)
        except EvaluationError as error:
            yield f"{module.class_name} has no number {error.unknown[0]}" if error.unknown else error.reason
            continue
        if value != own:
            yield f"{expression} is {value}, but {name} of {module.class_name} is {own}"
