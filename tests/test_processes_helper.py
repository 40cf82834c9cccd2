"""The helper itself: errors, deaths and hangs of ranks are reported by rank, and soon."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from processes import MOST_MADE, RanksFailed, on_ranks


def total(x: int) -> int:
    number = torch.tensor(x * (dist.get_rank() + 1))
    dist.all_reduce(number)
    return number.item()


def go_wrong(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("rank 1 says no")
        if how == "die":
            os._exit(7)
        time.sleep(60)
    dist.barrier()


def with_groups(number: int) -> int:
    for _ in range(number):
        dist.new_group()
    return os.getpid()


@pytest.mark.slow
def test_ranks_with_many_process_groups_are_replaced():
    first, second, third = (on_ranks(2, with_groups, number)[0] for number in (0, MOST_MADE, 0))
    assert first == second != third


@pytest.mark.slow
def test_ranks_answer_and_what_goes_wrong_on_one_is_named():
    assert on_ranks(2, total, 5) == [15, 15]
    for how, words in (("raise", "rank 1 says no"), ("die", "exit code 7"), ("hang", "in go_wrong")):
        start = time.monotonic()
        with pytest.raises(RanksFailed) as caught:
            on_ranks(2, go_wrong, how, seconds=5)
        assert words in caught.value.errors[1]
        assert time.monotonic() - start < 40
    assert on_ranks(2, total, 1) == [3, 3]
