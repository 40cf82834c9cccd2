"""The parts of packed dimensions that rules declare."""

from __future__ import annotations

from shardplan.core.expressions import count_of
from shardplan.core.plan import ResolvedPlan

from .stored_by_rules import StoredParameter

DEFAULT_PARTS = 2  # gate and up, the usual pair


def packed_parts(resolved: ResolvedPlan, stored: StoredParameter) -> tuple[int, ...] | str:
    """The lengths of the parts of a packed dimension, or why the rule's parts do not fit."""
    packed = DEFAULT_PARTS if stored.rule.packed is None else stored.rule.packed
    if isinstance(packed, str):
        count = count_of(packed, resolved.tree.numbers)
        if isinstance(count, str):
            return count
        packed = count
    if isinstance(packed, int):
        if packed < 1 or stored.size % packed:
            return f"{stored.size} features cannot be split into {packed} equal parts"
        return (stored.size // packed,) * packed
    parts: list[int] = []
    for expression in packed:
        part = count_of(expression, resolved.tree.numbers)
        if isinstance(part, str):
            return part
        parts.append(part)
    if sum(parts) != stored.size:
        return f"the parts {' + '.join(map(str, parts))} add up to {sum(parts)}, but the dimension has {stored.size} features"
    return tuple(parts)
