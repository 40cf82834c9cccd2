"""Assignment of work to ranks."""

from __future__ import annotations

from collections.abc import Sequence

ENOUGH = 1.02  # times the least possible load of the busiest rank


def assign(work: Sequence[int], busy: Sequence[int]) -> list[int]:
    """Divide pieces of work over ranks. The longest pieces go first, each to the rank with the least work. Then pieces move from
    the busiest rank to others, or change places, as long as that lowers its load.

    Args:
        work: the work of each piece.
        busy: the work that each rank already has.

    Returns:
        The rank of each piece: the same on all ranks, given the same arguments.
    """
    loads, owners = list(busy), [0] * len(work)
    for i in sorted(range(len(work)), key=lambda i: -work[i]):
        owners[i] = min(range(len(loads)), key=loads.__getitem__)
        loads[owners[i]] += work[i]
    least = ENOUGH * max(sum(loads) / len(loads), *busy, *work, 0)
    while max(loads) > least and _handed_over(work, owners, loads):
        pass
    return owners


def _handed_over(work: Sequence[int], owners: list[int], loads: list[int]) -> bool:
    """Whether one piece that moves, or two that change places, lowered the busiest rank's load."""
    busiest = max(range(len(loads)), key=loads.__getitem__)
    of_rank: list[dict[int, int]] = [{} for _ in loads]  # work -> a piece of this size
    for i, owner in enumerate(owners):
        of_rank[owner].setdefault(work[i], i)
    best: tuple[int, int, int, int | None] | None = None
    for other, pieces in enumerate(of_rank):
        gap = loads[busiest] - loads[other]
        for given, i in of_rank[busiest].items():
            for taken, j in [(0, None), *pieces.items()]:
                if 0 < (less := given - taken) < gap:
                    left = max(loads[busiest] - less, loads[other] + less)
                    if best is None or left < best[0]:
                        best = left, other, i, j
    if best is None:
        return False
    _, other, i, j = best
    less = work[i] - (0 if j is None else work[j])
    owners[i] = other
    if j is not None:
        owners[j] = busiest
    loads[busiest] -= less
    loads[other] += less
    return True
