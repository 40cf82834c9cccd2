"""Summaries of a log by phase and module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardplan.core.estimates import OFFLOADED, Category
from shardplan.core.mesh import Axis

from .meter import Log, category_of
from .overlap import ALONE, Overlap
from .part_costs import PartCosts
from .running_module import Place

Bytes = Mapping[Category, int]


@dataclass(frozen=True, slots=True)
class Moment:
    """The memory of a step at one place.

    Args:
        peak: category -> bytes at the moment of the place's largest sum.
        most: category -> maximum of its bytes while the place runs.
    """

    peak: Bytes
    most: Bytes


@dataclass(frozen=True, slots=True)
class Ledger:
    """One traced step of a rank.

    Args:
        moments: every place where memory changes.
        flops: dtype -> operations.
        calls, bytes: (axis, collective) -> the number of calls, and their ring bytes.
        stored: the number of elements of parameters that the rank stores.
        touched: the bytes of memory that the step must at least read or write.
        overlap: the products that run while collectives over tp, cp and ep are under way.
        parts: the costs of one micro-batch in each part of the model, at the traced depth, where they are wanted.
    """

    moments: Mapping[Place, Moment]
    flops: Mapping[str, int]
    calls: Mapping[tuple[Axis, str], int]
    bytes: Mapping[tuple[Axis, str], int]
    stored: int
    touched: int
    overlap: Overlap = ALONE
    parts: Mapping[str, PartCosts] = field(default_factory=dict)


def moments_of(log: Log, *, offloaded: bool) -> dict[Place, Moment]:
    """Replay a log.

    Args:
        offloaded: parameters, gradients and optimizer state are in the host's memory, and do not count for the device.
    """
    now: Counter[Category] = Counter()
    for record, size in log.before.items():
        now[category_of(record)] += size
    kinds = {change.record: category_of(change.record) for change in log.changes}
    away = frozenset(OFFLOADED if offloaded else ())
    total = sum(size for category, size in now.items() if category not in away)
    sums: dict[Place, int] = {}
    peaks: dict[Place, dict[Category, int]] = {}
    most: dict[Place, Counter[Category]] = {}
    for change in log.changes:
        category, place = kinds[change.record], change.place
        if place not in sums:  # the memory when the place begins
            sums[place], peaks[place], most[place] = total, dict(now), Counter(now)
        now[category] += change.bytes
        total += 0 if category in away else change.bytes
        most[place][category] = max(most[place][category], now[category])
        if total > sums[place]:
            sums[place], peaks[place] = total, dict(now)
    return {place: Moment(peaks[place], dict(most[place])) for place in sums}
