"""Blocks divided over stages: compared with trying every division."""

import itertools
import random

import pytest

from shardplan.core.balance import BlockCosts, balanced


def divisions(blocks, stages):
    for cuts in itertools.combinations(range(1, blocks), stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, blocks)))


def judged(costs, sizes, pp):
    """(sum over laps of the largest stage, sum of squares, sizes)."""
    ends = list(itertools.accumulate(sizes, initial=0))
    stages = [sum(costs.blocks[a:b]) for a, b in itertools.pairwise(ends)]
    stages[0] += costs.first
    stages[-1] += costs.last
    return sum(max(stages[i : i + pp]) for i in range(0, len(stages), pp)), sum(x * x for x in stages), sizes


@pytest.mark.parametrize("seed", range(60))
def test_no_division_is_better(seed):
    draw = random.Random(seed)
    pp, laps = draw.choice([(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (3, 2), (2, 3)])
    count = pp * laps + draw.randint(0, 6)
    kinds = draw.choice([(5,), (1, 9), (3, 4, 20)])
    costs = BlockCosts(tuple(draw.choice(kinds) for _ in range(count)), draw.choice([0, 3]), draw.choice([0, 7, 40]))
    best = min(judged(costs, sizes, pp) for sizes in divisions(count, pp * laps))
    assert judged(costs, balanced(costs, pp, laps), pp) == best


def test_the_cut_of_qwen3_8b():
    """At 4,096 tokens its head is 2.97 blocks: the published check."""
    costs = BlockCosts((100,) * 36, 0, 297)
    assert balanced(costs, 4) == (9, 10, 10, 7)
    assert balanced(costs, 8) == balanced(costs, 4, 2) == (4, 5, 5, 5, 5, 5, 5, 2)
    # The head alone is more than a sixteenth: a lap of small stages costs less than one with it twice.
    assert judged(costs, balanced(costs, 8, 2), 8)[0] == 500


def test_large_models_take_no_time():
    costs = BlockCosts(tuple(100 + (i % 7) for i in range(128)), 0, 400)
    assert sum(balanced(costs, 16, 2)) == sum(balanced(costs, 8, 4)) == 128


def test_fewer_blocks_than_stages():
    with pytest.raises(ValueError, match="3 blocks cannot be cut into 4 stages"):
        balanced(BlockCosts((1, 1, 1), 0, 0), 2, 2)
