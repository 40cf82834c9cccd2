"""What ranks that are threads send to each other."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardplan.proof.threads import on_threads
from shardplan.torchlib.rank_group import RankGroup


def received(count: int = 1, *, src: int = 0, tag: int = 0) -> list[Tensor]:
    """What this rank receives."""
    found = [torch.zeros(2) for _ in range(count)]
    for one in found:
        dist.recv(one, src, tag=tag)
    return found


def test_messages_come_in_the_order_in_which_they_were_sent():
    def run(rank: int) -> list[float]:
        if rank == 0:
            value = torch.zeros(2)
            for i in range(3):
                dist.send(value.fill_(i), 1)  # the receiver gets what it was when it was sent
            return []
        return [one[0].item() for one in received(3)]

    assert on_threads(2, run)[1] == [0, 1, 2]


def test_receipts_belong_to_the_messages_in_the_order_in_which_they_were_asked_for():
    def run(rank: int) -> list[float]:
        if rank == 0:
            for i in range(2):
                dist.send(torch.full((2,), float(i)), 1)
            return []
        found = [torch.zeros(2), torch.zeros(2)]
        for work in reversed([dist.irecv(one, 0) for one in found]):
            assert work is not None
            work.wait()
            assert work.is_completed()
        return [one[0].item() for one in found]

    assert on_threads(2, run)[1] == [0, 1]


def test_tags_and_groups_are_told_apart():
    def run(rank: int) -> list[float]:
        pair = dist.new_group([0, 1])
        if rank == 0:
            dist.send(torch.full((2,), 1.0), 1, tag=1)
            dist.send(torch.full((2,), 2.0), 1, tag=2)
            dist.send(torch.full((2,), 3.0), group=pair, group_dst=1, tag=1)
        elif rank == 1:
            other = torch.zeros(2)
            dist.recv(other, group=pair, group_src=0, tag=1)
            return [other[0].item(), received(tag=2)[0][0].item(), received(tag=1)[0][0].item()]
        return []

    assert on_threads(3, run)[1] == [3, 2, 1]


def test_two_ranks_send_to_each_other_at_once():
    def run(rank: int) -> float:
        theirs, other = torch.zeros(2), 1 - rank
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, theirs, other), dist.P2POp(dist.isend, torch.full((2,), float(rank)), other)]
        ):
            work.wait()
        return theirs[0].item()

    assert on_threads(2, run) == [1, 0]


def test_what_is_sent_keeps_nothing_of_autograd():
    def run(rank: int) -> bool:
        if rank == 0:
            dist.send(torch.ones(2, requires_grad=True) * 2, 1)
            return False
        return received()[0].requires_grad

    assert on_threads(2, run) == [False, False]


def test_a_rank_that_raises_ends_those_that_wait_for_what_it_sends():
    def run(rank: int) -> None:
        if rank == 1:
            raise ValueError("no")
        received(src=1)

    with pytest.raises(ValueError, match="no"):
        on_threads(3, run)


@pytest.mark.parametrize("also", ["receives", "gathers", "ends"])
def test_ranks_that_wait_for_each_other_are_an_error(also: str):
    def run(rank: int) -> None:
        if rank == 0:
            received(src=1)
        elif also == "receives":
            received(src=0)
        elif also == "gathers":
            dist.all_reduce(torch.ones(1))

    with pytest.raises(RuntimeError, match="wait in a collective, or for a value that no rank sends"):
        on_threads(2, run)


def test_a_group_that_a_rank_does_not_make_is_an_error():
    """Torch waits half an hour for the ranks of a group."""

    def run(rank: int) -> None:
        if rank == 0:
            dist.new_group([0, 1], use_local_synchronization=True)

    with pytest.raises(RuntimeError, match="rank 1 ended, but the other ranks wait"):
        on_threads(2, run)


def test_a_rank_that_raises_ends_those_that_make_a_group():
    def run(rank: int) -> None:
        if rank == 1:
            raise ValueError("no")
        dist.new_group([0, 1], use_local_synchronization=True)

    with pytest.raises(ValueError, match="no"):
        on_threads(2, run)


def test_ranks_call_the_same_collective():
    """Torch does what the first of them called."""

    def gather(rank: int) -> None:
        if rank == 0:
            dist.all_reduce(torch.ones(2))
        else:
            dist.all_gather([torch.zeros(2)] * 2, torch.ones(2))

    with pytest.raises(RuntimeError, match="a rank calls All.*, and another one of its group All"):
        on_threads(2, gather)
    with pytest.raises(
        RuntimeError, match=r"a rank calls Broadcast src ., and another one of its group Broadcast src ."
    ):
        on_threads(2, lambda rank: dist.broadcast(torch.ones(2), src=rank))


def test_a_collective_that_fails_on_a_rank_that_goes_on_is_an_error():
    """One rank does the work of all: the others waited for it, and it for them in the next collective."""

    def run(rank: int) -> None:
        try:
            dist.all_reduce(torch.ones(2 + rank))
        except Exception:
            dist.all_reduce(torch.ones(2))

    with pytest.raises(RuntimeError, match="size"):
        on_threads(2, run)


def test_what_nobody_receives_is_an_error():
    with pytest.raises(RuntimeError, match="what rank 0 of .* sent to rank 1 is not received"):
        on_threads(2, lambda rank: dist.send(torch.ones(2), 1) if rank == 0 else None)
    assert on_threads(2, lambda rank: rank) == [0, 1]


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
def test_sender_and_receiver_agree(other: Tensor):
    def run(rank: int) -> None:
        if rank == 0:
            dist.send(torch.ones(2), 1)
        else:
            dist.recv(other, 0)

    with pytest.raises(RuntimeError, match="sends torch.float32 \\[2\\], and rank 1 receives"):
        on_threads(2, run)


def test_ranks_are_let_go_while_no_other_begins_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch goes through the collectives that run: another rank that began or ended one meanwhile made it raise, and the ranks waited
    for ever."""
    monkeypatch.setattr(RankGroup, "first", None)
    threaded, held = RankGroup.__mro__[1], []
    monkeypatch.setattr(threaded, "exception_handle", lambda error: held.append(RankGroup._coll_lock.locked()))
    RankGroup.exception_handle(ValueError("of a rank"))
    assert held == [True]


READERS = """
import gc, time, torch
from shardplan.proof.threads import on_threads

class Garbage:
    def __init__(self):
        self.own = self

    def __del__(self):
        time.sleep(0.005)  # another thread gets the interpreter

def read(rank):
    get = torch.default_generator.get_state
    for _ in range(50):
        Garbage()
        get()

on_threads(2, lambda rank: None)  # what it imports makes garbage too
gc.set_threshold(2)
on_threads(2, read)
"""


def test_no_collection_begins_while_a_rank_reads_the_state_of_random_numbers():
    """It would run finalizers while torch holds the generator's lock, and the ranks would wait for ever: so in a process that can be ended."""
    subprocess.run([sys.executable, "-c", READERS], check=True, timeout=120)


def test_ranks_run_one_after_the_other():
    """Each until it waits for others: in a collective, for a message, for a group."""
    running, most = [0], [0]

    def busy() -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.005)  # another thread may have the interpreter
        running[0] -= 1

    def run(rank: int) -> None:
        for _ in range(3):
            busy()
            dist.all_reduce(torch.zeros(2))
        busy()
        if rank == 0:
            dist.send(torch.zeros(2), 1)
        elif rank == 1:
            received()
        busy()
        dist.new_group([0, 1, 2])
        busy()

    on_threads(3, run)
    assert most == [1]


def test_ranks_that_wait_for_each_other_in_ways_of_their_own_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardplan.torchlib.rank_group.LONG", 0.05)
    here = threading.Barrier(2)

    def run(rank: int) -> int:
        here.wait(30)
        value = torch.tensor([rank + 1])
        dist.all_reduce(value)
        here.wait(30)
        return int(value)

    assert on_threads(2, run) == [3, 3]
