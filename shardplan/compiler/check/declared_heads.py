"""The heads, groups and attributes that rules declare fit the model: each has a value, divides what it counts, and is what the
module itself has."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.diagnostics import Code, Diagnostic
from shardplan.core.expressions import EvaluationError, count_of, evaluate, parse_expression
from shardplan.core.plan import Assignment, Rule
from shardplan.core.tree import is_count
from shardplan.styles.own_buffers import own_buffer
from shardplan.styles.packed_lengths import packed_parts

from .check_words import by_rule
from .facts import Facts
from .stored_by_rules import StoredParameter

PLAN = """# shardplan validate mamba-codestral-7b.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  backbone.layers.*.mixer:
    style: input_with_grad_allreduce
    divide: [num_heads, intermediate_size, n_groups]
    set: {conv_dim: intermediate_size + 2 * n_groups * ssm_state_size}
    fused: false
  backbone.layers.*.mixer.in_proj:
    style: packed_colwise
    packed: [num_heads * head_dim, num_heads * head_dim, n_groups * state_size, n_groups * state_size, num_heads]
    heads: [num_heads, num_heads, n_groups, n_groups, num_heads]
  backbone.layers.*.mixer.conv1d:
    style: packed_depthwise
    packed: [num_heads * head_dim, n_groups * state_size, n_groups * state_size]
    heads: [num_heads, n_groups, n_groups]
  backbone.layers.*.mixer.{A_log,D,dt_bias}: colwise
  backbone.layers.*.mixer.norm: {style: colwise_norm, groups: n_groups, divide: group_size}
  backbone.layers.*.mixer.out_proj: rowwise
"""

HEADS = Code("SP313")
SETTING = Code("SP314")


WORDS = {
    HEADS: (
        "what the rule counts does not fit",
        "name numbers of the model's configuration that divide what they count",
    ),
    SETTING: (
        "`set` does not fit",
        "write an expression over the module's own numbers that is what the module has",
    ),
}


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for each rule and reason."""
    yield from by_rule(_problems(facts), lambda code, rule: WORDS[code])


def _problems(facts: Facts) -> Iterator[tuple[Code, str, Rule, str]]:
    for stored in facts.splits:
        for reason in _of_heads(facts, stored):
            yield from ((HEADS, reason, stored.rule, name) for name in stored.assigned)
    for assignment in facts.resolved.assignments.values():
        for reason in _of_arguments(facts, assignment):
            yield HEADS, reason, assignment.rule, assignment.name
        for reason in _of_buffers(facts, assignment):
            yield HEADS, reason, assignment.rule, assignment.name
        for reason in _of_settings(facts, assignment):
            yield SETTING, reason, assignment.rule, assignment.name


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


def _of_arguments(facts: Facts, assignment: Assignment) -> Iterator[str]:
    for one in assignment.rule.split_arguments:
        if assignment.is_parameter:
            yield "a parameter has no arguments"
            return
        count = count_of(one.heads, facts.resolved.tree.numbers) if one.heads is not None else facts.tp or 1
        if isinstance(count, str):
            yield count
        elif count % (facts.tp or 1):
            yield f"{one.argument} has {count} heads, which tp={facts.tp} does not divide"


def _of_buffers(facts: Facts, assignment: Assignment) -> Iterator[str]:
    for one in assignment.rule.split_buffers:
        if assignment.is_parameter:
            yield "a parameter has no buffers"
            return
        found = own_buffer(facts.resolved, facts.resolved.tree.modules[assignment.name], one)
        if isinstance(found, str):
            yield found


def _of_settings(facts: Facts, assignment: Assignment) -> Iterator[str]:
    if not assignment.rule.set:
        return
    if assignment.is_parameter:
        yield "a parameter has no attributes"
        return
    module = facts.resolved.tree.modules[assignment.name]
    on_a_rank = dict(module.numbers)
    for path in assignment.rule.divide:
        if is_count(number := on_a_rank.get(path)):
            on_a_rank[path] = max(1, int(number) // (facts.tp or 1))
    for name, expression in assignment.rule.set:
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
