"""What ranks tell each other through a store; `python -m tests.faults` has them killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore

from shardplan.runtime.training.watch_ranks import RankWatch


@pytest.fixture
def watches() -> Iterator[Callable[[int], list[RankWatch]]]:
    """Makes the watches of so many ranks, all in this process."""
    with ExitStack() as stack:

        def make(ranks: int) -> list[RankWatch]:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            stack.callback(store.num_keys)  # it lives until then
            made = [RankWatch(store, rank, ranks, patience=60.0, hosted=False) for rank in range(ranks)]
            for one in made:
                stack.callback(one.close, "failed")
            return made

        yield make


def test_all_say_who_failed_first_and_where(watches):
    first, second, third = watches(3)
    assert [step for one in (first, third) for step in one.steps(range(7, 8))] == [7, 7]
    line = "rank 2 failed first, in step 7: ValueError: no memory left"
    assert third.failed(ValueError("no memory\n  left")) == line
    assert first.failed(RuntimeError("Connection reset by peer")) == line == second.failed(KeyError())


def test_a_rank_that_has_not_begun_is_named(watches):
    (only,) = watches(1)
    only._ranks = 4
    with pytest.raises(RuntimeError, match="^ranks 1, 2 and 3 have not begun within 5 s$"):
        only.wait_for_all(5, until=0)
    only._ranks = 1
    only.wait_for_all(5, until=0)


def test_what_a_rank_knows_is_said_when_the_store_is_gone(watches):
    """The rank with the store ends because of another one, and this rank's collective fails before it has said why."""

    def gone(*_: object) -> None:
        raise RuntimeError("Connection reset by peer")

    for known, said in (
        ("", "the launcher, which has the store of all ranks, ended or does not answer"),
        ("rank 1 has given no sign for 60 s, in step 4", "rank 1 has given no sign for 60 s, in step 4"),
    ):
        (one,) = watches(1)
        one._quiet.set()
        one._own, one._line = SimpleNamespace(set=gone, add=gone, check=gone), known
        assert one.failed(RuntimeError("Connection closed by peer")) == said
