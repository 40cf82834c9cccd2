"""The cost of one micro-batch in each part of a model, from the log of a traced step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardplan.core.estimates import Category
from shardplan.core.mesh import Axis

from .meter import Log, category_of
from .overlap import ALONE, Overlap

STATIC: tuple[Category, ...] = ("parameters", "gradients", "optimizer state", "gathered parameters")


@dataclass(frozen=True, slots=True)
class Stored:
    """The sizes of a part's parameters on a rank.

    Args:
        elements: the elements that the rank stores.
        bytes: their bytes.
        whole: bytes of the whole tensors that data-parallel ranks gather.
        states: bytes of the optimizer's state.
        experts: the number of elements that are distributed over ep.
    """

    elements: int = 0
    bytes: int = 0
    whole: int = 0
    states: int = 0
    experts: int = 0

    def __add__(self, other: Stored) -> Stored:
        return Stored(
            self.elements + other.elements,
            self.bytes + other.bytes,
            self.whole + other.whole,
            self.states + other.states,
            self.experts + other.experts,
        )


@dataclass(frozen=True, slots=True)
class PartCosts:
    """The cost of one micro-batch in a part.

    Args:
        forward, backward: dtype -> floating-point operations; recomputation counts as backward.
        kept: category -> bytes that the forward keeps for the backward.
        burst: the maximum, over time, of the bytes of tensors that it makes.
        handed: bytes that are sent to the next stage where a stage ends with this part.
        traffic: (axis, collective) -> (calls, bytes).
        overlap: the products that run while its collectives are under way.
        touched: bytes of parameters that products read.
        stored: the sizes of its parameters.
    """

    forward: Mapping[str, int] = field(default_factory=dict)
    backward: Mapping[str, int] = field(default_factory=dict)
    kept: Mapping[Category, int] = field(default_factory=dict)
    burst: int = 0
    handed: int = 0
    traffic: Mapping[tuple[Axis, str], tuple[int, int]] = field(default_factory=dict)
    overlap: Overlap = ALONE
    touched: int = 0
    stored: Stored = Stored()

    @property
    def flops(self) -> int:
        return sum(self.forward.values()) + sum(self.backward.values())


def part_costs(log: Log, handed: Mapping[str, int], stored: Mapping[str, Stored]) -> dict[str, PartCosts]:
    """The costs of each part that a log has seen.

    Args:
        handed, stored: by part.
    """
    kept: dict[str, Counter[Category]] = {}
    live: Counter[str] = Counter()
    burst: Counter[str] = Counter()
    for record, size in log.kept.items():
        if (category := category_of(record)) not in STATIC:
            kept.setdefault(record.part, Counter())[category] += size
    for change in log.changes:
        if category_of(change.record) not in STATIC:
            part = change.record.part
            live[part] += change.bytes
            burst[part] = max(burst[part], live[part])
    touched: Counter[str] = Counter()
    for record, size, part in log.operands:
        if category_of(record) in ("parameters", "gathered parameters"):
            touched[part] += size
    parts = {*burst, *touched, *stored, *(part for part, *_ in log.part_flops)}

    def flops(part: str, what: str) -> dict[str, int]:
        return {dtype: n for (p, w, dtype), n in log.part_flops.items() if (p, w) == (part, what)}

    return {
        part: PartCosts(
            forward=flops(part, "forward"),
            backward=flops(part, "backward"),
            kept=kept.get(part, {}),
            burst=burst[part],
            handed=handed.get(part, 0),
            traffic={
                (axis, name): (calls, log.part_bytes[part, axis, name])
                for (p, axis, name), calls in log.part_calls.items()
                if p == part
            },
            overlap=log.overlaps.get(part, ALONE),
            touched=touched[part],
            stored=stored.get(part, Stored()),
        )
        for part in parts
    }
