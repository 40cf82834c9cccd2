"""Tables of `fit` for axis sizes that were not traced, computed from those that were."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shardplan.core.mesh import Axis

from .fit_screening import Table
from .overlap import Overlap
from .part_costs import PartCosts, Stored


def of_experts(table: Table, traced: int, ep: int) -> Table:
    """The parts with experts over another number of ranks. Each rank has another share of the experts, the same mean number of rows,
    and sends (ep - 1) / ep of these rows.

    Args:
        table: the table at ep = `traced`, above 1.
    """

    def part(one: PartCosts) -> PartCosts:
        experts = one.stored.experts * traced // ep
        stored = replace(
            one.stored, elements=one.stored.elements - one.stored.experts + experts, experts=experts
        )  # nothing reads its bytes
        sent = (ep - 1) * traced / (ep * (traced - 1))
        traffic = {
            (axis, name): (calls, int(size * sent) if axis is Axis.EP else size)
            for (axis, name), (calls, size) in one.traffic.items()
        }
        return replace(one, stored=stored, traffic=traffic)

    return replace(table, costs={name: part(one) for name, one in table.costs.items()})


def of_context(few: Table, many: Table, sizes: tuple[int, int], cp: int) -> Table:
    """The parts with a sequence over another number of ranks. One share of a part's cost is divided by cp, and one is not
    (a mixer that is computed whole), so the cost is a line over 1 / cp. The bytes sent over cp are (cp - 1) / cp times such
    a line: for exchanged heads a share of a rank's tokens, for gathered tokens all tokens.

    Args:
        few, many: the tables traced at the two `sizes` of cp.
    """
    a, b = sizes
    weight = (1 / cp - 1 / a) / (1 / b - 1 / a)

    def number(x: int, y: int) -> int:
        return max(0, round(x + (y - x) * weight))

    def sent(axis: Axis) -> Callable[[int, int], int]:
        if axis is not Axis.CP:
            return number
        of_a, of_b, of_cp = (1 - 1 / n for n in (a, b, cp))
        return lambda x, y: max(0, round(of_cp * (x / of_a + (y / of_b - x / of_a) * weight)))

    def numbers(x: Mapping[Any, int], y: Mapping[Any, int]) -> dict[Any, int]:
        return {key: number(x.get(key, 0), y.get(key, 0)) for key in {**x, **y}}

    def part(x: PartCosts, y: PartCosts) -> PartCosts:
        return PartCosts(
            forward=numbers(x.forward, y.forward),
            backward=numbers(x.backward, y.backward),
            kept=numbers(x.kept, y.kept),
            burst=number(x.burst, y.burst),
            handed=number(x.handed, y.handed),
            traffic={key: _pair(x.traffic, y.traffic, key, sent(key[0])) for key in {**x.traffic, **y.traffic}},
            overlap=Overlap(numbers(x.overlap.sent, y.overlap.sent), numbers(x.overlap.products, y.overlap.products)),
            touched=number(x.touched, y.touched),
            stored=x.stored,
        )

    nothing = PartCosts(stored=Stored())
    names = {**few.costs, **many.costs}
    return replace(few, costs={n: part(few.costs.get(n, nothing), many.costs.get(n, nothing)) for n in names})


def _pair(x: Any, y: Any, key: Any, number: Callable[[int, int], int]) -> tuple[int, int]:
    (calls, size), (other, large) = x.get(key, (0, 0)), y.get(key, (0, 0))
    return max(calls, other), number(size, large)
