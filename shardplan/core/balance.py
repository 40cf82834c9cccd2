"""The blocks of a model divided over pipeline stages so that a step takes the least time: exactly, for costs that are known."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import inf

Squares = tuple[float, tuple[int, ...]]  # the sum of squares of stages' costs, and their sizes


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """What a micro-batch costs in each part of a model, forward and backward: floating point operations.

    Args:
        blocks: of each block, in the order in which they run.
        first, last: of what the first and the last stage have besides.
    """

    blocks: tuple[int, ...]
    first: int
    last: int


def balanced(costs: BlockCosts, pp: int, stages_per_rank: int = 1) -> tuple[int, ...]:
    """How many blocks each stage has.

    The stages 0 to pp - 1, then pp to 2 pp - 1, ... are *laps*: a batch runs once through all ranks. In a schedule's steady state each
    micro-batch takes as long as the largest stage of every lap: the sum of these is the least that there is. Among divisions
    that are as good, the one is chosen whose stages are most alike (the least sum of squares), then the one with the fewest blocks
    in early stages, which have the most micro-batches in flight.

    Raises:
        ValueError: there are fewer blocks than stages.
    """
    count, stages = len(costs.blocks), pp * stages_per_rank
    if count < stages:
        raise ValueError(f"{count} blocks cannot be cut into {stages} stages")
    before = list(accumulate(costs.blocks, initial=0))

    def cost(stage: int, start: int, end: int) -> int:
        besides = (costs.first if stage == 0 else 0) + (costs.last if stage == stages - 1 else 0)
        return before[end] - before[start] + besides

    @cache
    def largest(lap: int, start: int) -> list[float]:
        """The least size that the largest stage of a lap can have, for the blocks from `start` to each end."""
        found = [inf] * (count + 1)
        found[start] = 0
        for stage in range(lap * pp, lap * pp + pp):
            taken, found = found, [inf] * (count + 1)
            for end in range(start + 1 + stage - lap * pp, count + 1):
                # The later this stage begins, the larger are those before it and the smaller it is: the best is where they cross.
                begins = range(start + stage - lap * pp, end)
                at = bisect_left(begins, True, key=lambda i: taken[i] >= cost(stage, i, end))
                found[end] = min(max(taken[i], cost(stage, i, end)) for i in begins[max(at - 1, 0) : at + 1])
        return found

    @cache
    def rest(lap: int, start: int) -> float:
        """The least sum of largest stages, of this lap and all after it."""
        if lap == stages_per_rank:
            return 0 if start == count else inf
        return min(largest(lap, start)[end] + rest(lap + 1, end) for end in _ends(lap, start))

    def _ends(lap: int, start: int) -> range:
        later = (stages_per_rank - lap - 1) * pp
        return range(start + pp if later else count, count - later + 1)

    @cache
    def alike(stage: int, start: int, end: int, most: float) -> Squares:
        """The stages from this one to its lap's last that are most alike, none larger than `most`."""
        left = -(stage + 1) % pp  # stages of the lap after this one
        best: Squares = inf, ()
        for mine in range(start + 1, end - left + 1) if left else (end,):
            if (own := cost(stage, start, mine)) > most:
                break
            squares, sizes = alike(stage + 1, mine, end, most) if left else (0, ())
            if own * own + squares < best[0]:
                best = own * own + squares, (mine - start, *sizes)
        return best

    @cache
    def chosen(lap: int, start: int) -> Squares:
        if lap == stages_per_rank:
            return 0, ()
        best: Squares = inf, ()
        for end in _ends(lap, start):
            most = largest(lap, start)[end]
            if most + rest(lap + 1, end) == rest(lap, start):
                squares, sizes = alike(lap * pp, start, end, most)
                later, others = chosen(lap + 1, end)
                if squares + later < best[0]:
                    best = squares + later, sizes + others
        return best

    return chosen(0, 0)[1]
