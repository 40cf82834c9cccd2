"""Small numbers with the same relation to tp, and to each other, as the original ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import count
from math import lcm
from types import MappingProxyType

WIDTHS_OF_HIDDEN = (0.25, 2.0)  # other widths stay between these multiples of the hidden size
# Up to four times for a vision tower: four joined patches are four times as wide.
WIDTHS_OF_TOWER = (0.25, 4.0)


def same_relation(small: int, large: int, tp: int) -> bool:
    """Whether both are multiples of tp or neither, and both are below tp or neither."""
    return (small % tp == 0) == (large % tp == 0) and (small < tp) == (large < tp)


def like(large: int, tp: int, *, at_least: int, multiple_of: int = 1, avoid: Collection[int] = ()) -> int:
    """The smallest number, at least `at_least`, with the same relation to tp as `large`.

    Args:
        large: the original.
        tp: the number of ranks.
        at_least: the lower bound; ignored where `large` is below tp and the bound is not.
        multiple_of: divides the result, unless none of its first 64 tp multiples has this relation.
        avoid: numbers already taken.
    """
    if large < tp <= at_least:
        at_least = 1
    step = max(1, multiple_of)
    start = -(-at_least // step) * step
    for small in count(start, step):
        if same_relation(small, large, tp) and small not in avoid:
            return small
        if small > start + 64 * tp * step:  # no multiple of `multiple_of` can
            return like(large, tp, at_least=at_least, avoid=avoid)
    raise AssertionError("unreachable")


def small_counts(
    values: Iterable[int],
    tp: int,
    *,
    at_least: int = 2,
    times: int = 1,
    cp: int = 1,
    shared: Mapping[int, int] = MappingProxyType({}),
) -> dict[int, int]:
    """Small counts (of heads, for example) for large ones. They keep order, equality, and divisibility by each
    other and by tp.

    A count with several per rank keeps at least two per rank; a count that divides tp does not change. For example,
    {32, 8} at tp 2 gives `{8: 4, 32: 8}`.

    Args:
        values: the counts.
        tp: the number of ranks.
        at_least: the lower bound of a count that tp does not divide.
        times: the factor by which counts that tp divides are larger than usual.
        cp: the number of ranks that share the heads of a tp rank; it divides counts with several heads on one rank.
        shared: counts of heads that several cp ranks compute with -> the number on a tp rank.
    """
    if cp == 1:
        shared = {}
    small: dict[int, int] = {}
    floor = 1
    values = sorted({v for v in values if v > 0})
    # Where several ranks compute with a head, each has several queries for it: code that repeats the head shows the number.
    most = times * (4 * tp if any(value < tp and tp % value == 0 for value in values) else 2 * tp)
    most = max(most, times * tp * cp * (4 if shared.keys() & values else 1))
    for value in values:
        if value < tp and tp % value == 0:  # several ranks compute with a head: the same number for each head
            small[value], floor = value, value + 1
            continue
        if value in shared:
            small[value] = tp * shared[value]
            floor = small[value] + 1
            continue
        divisors = [small[other] for other in small if value % other == 0]
        if value > tp and value % tp == 0:
            divisors.append(tp * cp)
        begin = min(value, most) if value % tp == 0 else min(value, at_least)
        small[value] = like(value, tp, at_least=max(floor, begin), multiple_of=lcm(*divisors) if divisors else 1)
        floor = small[value] + 1
    return small


def small_head_dims(
    values: Iterable[int],
    parts: Iterable[tuple[int, float]] = (),
    suits: Callable[[Mapping[int, int]], bool] = lambda small: True,
    least: int = 8,
) -> dict[int, int]:
    """Small head dims, all by the same factor, so that sums (no-rope and rope parts) are kept.

    Args:
        values: the head dims.
        parts: (head dim, fraction of it that is rotary): this many dims, rounded down, must stay even.
        suits: a condition on the result, if some result fulfils it.
        least: the lower bound of the smallest result.
    """
    values = sorted({v for v in values if v > 0})
    if not values:
        return {}
    parts = [(dim, fraction) for dim, fraction in parts if 0 < fraction < 1]
    even: list[dict[int, int]] = []
    for smallest in (8, 10, 12, 14, 16, 18, 20, 24, 32, 40, 48, 64, 80, 96, 128):
        if smallest < least:
            continue
        if smallest >= values[0]:
            break
        scaled = [v * smallest / values[0] for v in values]
        rotary = [int(dim * fraction * smallest / values[0] + 1e-9) for dim, fraction in parts]
        if all(v == int(v) and v % 2 == 0 for v in scaled) and all(v >= 2 and v % 2 == 0 for v in rotary):
            even.append({v: int(s) for v, s in zip(values, scaled, strict=True)})
    unchanged = {v: v for v in values}
    return next((small for small in even if suits(small)), even[0] if even else unchanged)


def small_widths(
    values: Iterable[int], hidden: tuple[int, int], tp: int, limits: tuple[float, float] = WIDTHS_OF_HIDDEN
) -> dict[int, int]:
    """Small widths in about the original proportion to the hidden size; different widths stay different.

    Args:
        values: intermediate sizes, ranks and the like.
        hidden: the original and the small hidden size.
        tp: the number of ranks.
        limits: the smallest and the largest width, as multiples of the hidden size.
    """
    large, small = hidden
    lowest, highest = limits
    result = {large: small}
    for value in sorted({v for v in values if v > 0} - {large}):
        ratio = min(max(value / large, lowest), highest)
        wanted = max(8, round(small * ratio))
        step = 4 if value % 4 == 0 else 1
        result[value] = like(value, tp, at_least=min(wanted, value), multiple_of=step, avoid=set(result.values()))
    return result
