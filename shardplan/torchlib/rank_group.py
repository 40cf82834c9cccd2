"""torch's process group for threads, extended by sending from one rank to another."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from .private import private

BACKEND = "threads"

_Threaded: Any = private("ThreadedGroup")
_ThreadedCollective: Any = private("ThreadedCollective")
ENDED = "another rank has ended"
LONG = 1.0  # seconds after which a rank runs beside another one, which may wait for it in a way that nobody here knows
Place = tuple[str, int, int, int, int]  # of a message: group, source, destination, tag, number among such messages


class Turn:
    """Ranks run one after the other: each until it waits for others. Threads that run Python at once pass the interpreter on in each operation
    of torch, which takes a third of their time."""

    _of_thread = threading.local()

    def __init__(self) -> None:
        self._free = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """The thread's turn, but for `given_up`."""
        self._of_thread.turn, self._of_thread.held = self, self._free.acquire(timeout=LONG)
        try:
            yield
        finally:
            self._pass_on()
            self._of_thread.turn = None

    @classmethod
    @contextmanager
    def given_up(cls) -> Iterator[None]:
        """While the thread waits for other ranks, they have the turn; nothing for a thread without one."""
        turn = getattr(cls._of_thread, "turn", None)
        if turn is None:
            yield
            return
        turn._pass_on()
        try:
            yield
        finally:
            cls._of_thread.held = turn._free.acquire(timeout=LONG)

    def _pass_on(self) -> None:
        if self._of_thread.held:
            self._of_thread.held = False
            self._free.release()


class RankGroup(_Threaded):
    """A process group whose ranks are threads.

    A sent tensor is copied and waits until it is received; the sender does not wait. Messages with one tag arrive in the order
    in which they were sent. A rank that receives from an ended one waits until `exception_handle` is called, and then ends too.
    """

    _post = threading.Condition()
    _messages: dict[Place, Tensor] = {}  # noqa: RUF012  # of all groups, like torch's own
    _receiving: dict[object, Place] = {}  # noqa: RUF012
    first: BaseException | None = None  # the error of a rank
    _meeting: dict[object, Callable[[], bool]] = {}  # noqa: RUF012  # tells whether ranks are still missing

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

    def _get_backend(self, device: torch.device) -> RankGroup:
        """The backend for a device. torch 2.14 calls this for any class of groups, to ask whether the backend sends several tensors at once."""
        return self

    def _next(self, src: int, dst: int, tag: int, *, sends: bool) -> Place:
        between = (src, dst, tag)
        self._posted[(*between, sends)] += 1
        return (self.pg_name, *between, self._posted[(*between, sends)])

    @classmethod
    def meet(cls, store: dist.Store, size: int) -> None:
        """Wait until all ranks of a group have created it, or a rank has ended: then torch itself would wait for half an hour.

        Args:
            store: the group's.
        """

        def missing() -> bool:
            return store.add("here", 0) < size

        me = object()
        with Turn.given_up(), cls._post:
            store.add("here", 1)
            cls._post.notify_all()
            cls._meeting[me] = missing
            cls._post.wait_for(lambda: not missing() or cls._terminate.is_set())
            del cls._meeting[me]
        if missing():
            sys.exit(ENDED)

    @classmethod
    def exception_handle(cls, error: BaseException) -> None:
        """End all waiting ranks."""
        cls.first = cls.first or error
        with cls._coll_lock:  # torch iterates over the collectives while other ranks begin and end some
            _Threaded.exception_handle(error)
        with cls._post:
            cls._post.notify_all()

    @classmethod
    def reset(cls) -> None:
        """Forget what ranks wait for, and the sent messages."""
        _Threaded.reset()
        cls.first = None
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
        """What ranks wait for, and how many wait. If two calls return the same, the ranks have waited all the time in between."""
        with cls._coll_lock:
            running: list[Any] = list(_Threaded._cur_coll_on_pgs.values())
        joined = {(one, count) for one in running if (count := one._count) < one._world_size}
        with cls._post:
            alone = {one for one, place in cls._receiving.items() if place not in cls._messages}
            alone |= {one for one, missing in cls._meeting.items() if missing()}
        return frozenset(joined | alone), sum(count for _, count in joined) + len(alone)


class _Collective(_ThreadedCollective):
    """A collective of a whole group. One rank does all the work. If it fails, the other ranks end, however it handles the error."""

    def join(self, rank: int, data: Any) -> Any:
        try:
            with Turn.given_up():
                return super().join(rank, data)
        except Exception as error:
            RankGroup.exception_handle(error)
            raise


def _begin(mine: Any, group: RankGroup) -> _Collective:
    """The running collective of a group: a new one of this kind, or one that another rank has begun.

    Raises:
        RuntimeError: that one is of another kind, or has another source rank; torch would apply the first rank's call to all ranks.
    """
    with _Threaded._coll_lock:
        name, running = group.pg_name, _Threaded._cur_coll_on_pgs
        if name not in running:
            running[name] = _Collective(group.size(), mine, _Threaded)
        joined: _Collective = running[name]
    other = joined._collective
    if type(mine) is not type(other) or vars(mine) != vars(other):
        error = RuntimeError(f"a rank calls {_in_words(mine)}, and another one of its group {_in_words(other)}")
        RankGroup.exception_handle(error)
        raise error
    return joined


def _in_words(collective: Any) -> str:
    return " ".join([type(collective).__name__, *(f"{name} {value}" for name, value in vars(collective).items())])


@contextmanager
def compared_collectives() -> Iterator[None]:
    """While active, ranks that call different collectives of one group at once get an error."""
    with patch.object(_Threaded, "_start_coll", staticmethod(_begin)):
        yield


class Work:
    """What torch's functions return at once, for work that is done."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is done."""
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
        with Turn.given_up(), group._post:
            group._receiving[me] = self._place
            group._post.wait_for(lambda: self._place in group._messages or group._terminate.is_set())
            group._receiving.pop(me, None)
            sent = group._messages.pop(self._place, None)
        if sent is None:
            sys.exit(ENDED)  # as in torch's collectives
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
    group.meet(store, size)  # a subgroup exists on all of its ranks
    return group


dist.Backend.register_backend(BACKEND, _create, devices=["cpu", "cuda"])
