"""torch's process group for threads, with what it lacks: sending from one rank to another."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Hashable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .private import private

BACKEND = "threads"

_Threaded: Any = private("ThreadedGroup")
Place = tuple[str, int, int, int, int]  # of a message: the group, from, to, the tag, its number among those


class RankGroup(_Threaded):
    """A process group whose ranks are threads.

    What is sent is copied, and waits until it is received; nobody waits until it is. Messages with one tag come in the order in which they were
    sent. A rank that receives from one that has ended waits until `exception_handle` is called, and then ends too.
    """

    _post = threading.Condition()
    _messages: dict[Place, Tensor] = {}  # noqa: RUF012  # of all groups, as torch's own
    _receiving: dict[object, Place] = {}  # noqa: RUF012

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)
        self._posted: Counter[Hashable] = Counter()

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int) -> Work:
        """Leave a tensor for a rank."""
        (tensor,) = tensors
        place = self._next(self._rank, dst, tag, sends=True)
        with self._post:
            self._messages[place] = tensor.detach().clone()
            self._post.notify_all()
        return Work()

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int) -> Work:
        """Receive a tensor of that size and dtype; it is there after `wait`."""
        (tensor,) = tensors
        return _Receipt(self._next(src, self._rank, tag, sends=False), tensor)

    def _next(self, src: int, dst: int, tag: int, *, sends: bool) -> Place:
        between = (src, dst, tag)
        self._posted[(*between, sends)] += 1
        return (self.pg_name, *between, self._posted[(*between, sends)])

    @classmethod
    def exception_handle(cls, error: BaseException) -> None:
        """Let all ranks that wait end."""
        with cls._coll_lock:  # torch goes through the collectives, which other ranks begin and end meanwhile
            _Threaded.exception_handle(error)
        with cls._post:
            cls._post.notify_all()

    @classmethod
    def reset(cls) -> None:
        """Forget what ranks wait for, and what was sent."""
        _Threaded.reset()
        with cls._post:
            cls._messages.clear()
            cls._receiving.clear()

    @classmethod
    def unreceived(cls) -> str | None:
        """A message that no rank has received, in words."""
        with cls._post:
            found = next(iter(cls._messages), None)
        return None if found is None else f"what rank {found[1]} of {found[0]} sent to rank {found[2]} is not received"

    @classmethod
    def waiting(cls) -> tuple[frozenset[object], int]:
        """What ranks wait for, and how many do. Where two looks give the same, they have waited all the time in between."""
        with cls._coll_lock:
            running: list[Any] = list(_Threaded._cur_coll_on_pgs.values())
        joined = {(one, count) for one in running if (count := one._count) < one._world_size}
        with cls._post:
            receipts = {one for one, place in cls._receiving.items() if place not in cls._messages}
        return frozenset(joined | receipts), sum(count for _, count in joined) + len(receipts)


class Work:
    """What torch's functions return at once, of something that is done."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it is done."""
        return True

    def is_completed(self) -> bool:
        """Whether `wait` returns at once."""
        return True


class _Receipt(Work):
    def __init__(self, place: Place, tensor: Tensor):
        self._place, self._tensor, self._taken = place, tensor, False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._taken:
            return True
        self._taken, group, me = True, RankGroup, object()
        with group._post:
            group._receiving[me] = self._place
            group._post.wait_for(lambda: self._place in group._messages or group._terminate.is_set())
            group._receiving.pop(me, None)
            sent = group._messages.pop(self._place, None)
        if sent is None:
            sys.exit("another rank has ended")  # as in torch's collectives
        if (sent.numel(), sent.dtype) != (self._tensor.numel(), self._tensor.dtype):  # torch sends scalars as vectors
            raise RuntimeError(
                f"rank {self._place[1]} of the group sends {sent.dtype} {list(sent.shape)}, and rank {self._place[2]} receives "
                f"{self._tensor.dtype} {list(self._tensor.shape)}"
            )
        with torch.no_grad():
            self._tensor.detach().copy_(sent.view(self._tensor.shape))
        return True

    def is_completed(self) -> bool:
        with RankGroup._post:
            return self._taken or self._place in RankGroup._messages


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> RankGroup:
    group = RankGroup(rank, size)
    private("store_barrier")(rank, store, "", size, timeout)  # a subgroup is there on all of its ranks
    return group


dist.Backend.register_backend(BACKEND, _create, devices=["cpu", "cuda"])
