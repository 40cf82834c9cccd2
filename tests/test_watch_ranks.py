"""What ranks tell each other through a store; `python -m tests.faults` has them killed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore

from shardplan.runtime.training.watch_ranks import RankWatch


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes with which a guard would have ended this process."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


@pytest.fixture
def watches(exits: list[int]) -> Iterator[Callable[..., list[RankWatch]]]:
    """Makes the watches of so many ranks, all in this process."""
    with ExitStack() as stack:

        def make(ranks: int, patience: float = 60.0) -> list[RankWatch]:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            stack.callback(store.num_keys)  # it lives until then
            made = [RankWatch(store, rank, ranks, patience=patience, hosted=False) for rank in range(ranks)]
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


def test_a_rank_that_gives_no_sign_for_longer_than_patience_is_named(watches):
    first, second = watches(2, patience=3.0)
    assert list(second.steps(["3"])) == ["3"]
    second._quiet.set()  # as one that is stopped
    assert soon(lambda: first._line) == "rank 1 has given no sign for 3 s, in step 3"


def test_a_rank_that_does_not_notice_ends_with_the_line(watches, exits, monkeypatch, capsys):
    """It waits in a collective: the guard ends its process."""
    monkeypatch.setattr(sys.modules[RankWatch.__module__], "SILENT", 0.2)
    first, second = watches(2)
    second._over.set()  # it leaves by its own error, and needs no guard
    assert list(first.steps([5])) == [5]
    line = second.failed(ValueError("no memory left"))
    assert soon(lambda: exits) and {*exits} == {1}
    assert f"rank 0, in step 5, ends here: {line}\n" in capsys.readouterr().err


def test_a_watch_that_is_not_closed_ends_with_its_process(watches):
    assert all(thread.daemon for one in watches(2) for thread in one._threads)


def soon(found: Callable[[], Any]) -> Any:
    """What is found within a minute, on a busy machine."""
    until = time.monotonic() + 60
    while not found() and time.monotonic() < until:
        time.sleep(0.05)
    return found()
