"""The numbers that rules name: parts of packed dimensions, declared counts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from shardplan.core.expressions import EvaluationError, Expression, evaluate, parse_expression
from shardplan.core.plan import ResolvedPlan

from .stored_by_rules import StoredParameter

DEFAULT_PARTS = 2  # gate and up, the usual pair

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
