"""The parts of packed dimensions, as rules declare them."""

from __future__ import annotations

from collections.abc import Mapping

from shardplan.core.expressions import count_of
from shardplan.core.plan import Rule

DEFAULT_PARTS = 2  # gate and up, the usual pair


def packed_parts(rule: Rule, size: int, numbers: Mapping[str, int | float]) -> tuple[int, ...] | str:
    """The lengths of the parts of a packed dimension, or the reason why the rule's parts do not fit.

    Args:
        size: the length of the dimension.
        numbers: the numbers of the model's configuration.
    """
    packed = DEFAULT_PARTS if rule.packed is None else rule.packed
    if isinstance(packed, str):
        count = count_of(packed, numbers)
        if isinstance(count, str):
            return count
        packed = count
    if isinstance(packed, int):
        if packed < 1 or size % packed:
            return f"{size} features cannot be split into {packed} equal parts"
        return (size // packed,) * packed
    parts: list[int] = []
    for expression in packed:
        part = count_of(expression, numbers)
        if isinstance(part, str):
            return part
        parts.append(part)
    if sum(parts) != size:
        return f"the parts {' + '.join(map(str, parts))} add up to {sum(parts)}, but the dimension has {size} features"
    return tuple(parts)
