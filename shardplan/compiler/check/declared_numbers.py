"""The numbers that rules name: parts of packed dimensions, declared counts, attributes to divide."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from shardplan.core.expressions import EvaluationError, Expression, evaluate, parse_expression
from shardplan.core.plan import Assignment, ResolvedPlan

from .stored_by_rules import StoredParameter

DEFAULT_PARTS = 2  # gate and up, the usual pair
CONFIG = "config."

_parse = lru_cache(maxsize=1024)(parse_expression)


def declared(expression: str, numbers: Mapping[str, int | float]) -> int | str:
    """The value of an expression over config numbers, or why it has none."""
    parsed: Expression = _parse(expression)
    try:
        count = evaluate(parsed, numbers)
    except EvaluationError as error:
        return error.reason
    return count if count > 0 else f"{expression} is {count}"


def packed_parts(resolved: ResolvedPlan, stored: StoredParameter) -> tuple[int, ...] | str:
    """The lengths of the parts of a packed dimension, or why the rule's parts do not fit."""
    packed = DEFAULT_PARTS if stored.rule.packed is None else stored.rule.packed
    if isinstance(packed, int):
        if packed < 1 or stored.size % packed:
            return f"{stored.size} features cannot be split into {packed} equal parts"
        return (stored.size // packed,) * packed
    parts: list[int] = []
    for expression in packed:
        part = declared(expression, resolved.tree.numbers)
        if isinstance(part, str):
            return part
        parts.append(part)
    if sum(parts) != stored.size:
        return f"the parts {' + '.join(map(str, parts))} add up to {sum(parts)}, but the dimension has {stored.size} features"
    return tuple(parts)


def attribute(resolved: ResolvedPlan, assignment: Assignment, path: str) -> int | str | None:
    """The number that a `divide` path names on the module, or why there is none.

    None where only a nested config, of which it is unknown whether it is this module's, has it in several
    values.
    """
    tree = resolved.tree
    owner = tree.modules[tree.owner(assignment.name) if assignment.is_parameter else assignment.name]
    if path.startswith(CONFIG):
        name = path.removeprefix(CONFIG)
        if owner.config is not None:
            found = {owner.config[name]} if name in owner.config else set()
        else:
            found = {tree.numbers[name]} if name in tree.numbers else _nested(tree.numbers, name)
        if len(found) > 1:
            return None
        value = next(iter(found), None)
        where = "the configuration" if owner.config != {} else f"{owner.class_name}, which has no configuration,"
    else:
        name = path
        value = owner.numbers.get(name)
        where = owner.class_name
    if value is None:
        return f"{where} has no number {name}"
    if isinstance(value, bool) or not float(value).is_integer() or value < 1:
        return f"{name} of {where} is {value}, not a count"
    return int(value)


def _nested(numbers: Mapping[str, int | float], name: str) -> set[int | float]:
    return {value for key, value in numbers.items() if key.endswith(f".{name}")}
