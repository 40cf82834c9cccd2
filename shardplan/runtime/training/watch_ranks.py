"""The last line of every rank says which other rank ended, and in which step."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from shardplan.runtime.parallel.process_groups import named_ranks

T = TypeVar("T")
BEAT = 0.5  # seconds between two signs of a rank
SILENT = 5.0  # once another rank has an error, seconds without a sign after which a rank counts as ended
_SIGN, _END, _ORDER = "sign/", "end", "order"
_HERE, _LEFT, _FAILED = "here", "left", "failed"


@dataclass(frozen=True)
class _Sign:
    """The last sign of a rank."""

    count: int = 0
    state: str = _HERE
    order: int = 0  # the place of its failure among the failures of all ranks
    step: str = ""
    text: str = ""

    def packed(self) -> str:
        return "\n".join((str(self.count), self.state, str(self.order), self.step, self.text))

    @staticmethod
    def unpacked(value: bytes) -> _Sign:
        count, state, order, step, text = value.decode().split("\n", 4)
        return _Sign(int(count), state, int(order), step, text)


class RankWatch:
    """The signs that ranks give each other. `watch_ranks` makes it."""

    def __init__(self, store: Any, rank: int, ranks: int, patience: float, hosted: bool):
        self.rank, self._ranks, self._patience, self._hosted = rank, ranks, patience, hosted
        self._sign, self._lock = _Sign(), threading.Lock()
        self._quiet, self._over = threading.Event(), threading.Event()  # no more signs; nothing left to guard
        self._line, self._answered = "", time.monotonic()  # why this rank ends; when the store answered last
        self._own = store.clone()  # its own connection: the store's is busy while the group waits
        self._own.set_timeout(timedelta(seconds=patience))
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._watch, self._guard)]
        for thread in self._threads:
            thread.start()
        self._say()

    def steps(self, steps: Iterable[T]) -> Iterator[T]:
        """Yield the steps unchanged. The last line of a rank names the step that began last."""
        for step in steps:
            with self._lock:
                self._sign = replace(self._sign, step=str(step))
            self._say()
            yield step

    def _say(self, **changes: Any) -> None:
        with self._lock:
            self._sign = replace(self._sign, count=self._sign.count + 1, **changes)
            self._own.set(f"{_SIGN}{self.rank}", self._sign.packed())

    def _signs(self, ranks: Iterable[int]) -> dict[int, _Sign]:
        """The last sign of each of these ranks that has begun."""
        begun = [rank for rank in ranks if self._own.check([f"{_SIGN}{rank}"])]
        values = self._own.multi_get([f"{_SIGN}{rank}" for rank in begun]) if begun else []
        self._answered = time.monotonic()
        return {rank: _Sign.unpacked(value) for rank, value in zip(begun, values, strict=True)}

    def wait_for_all(self, start: float, until: float) -> None:
        """Wait until every rank has begun.

        Raises:
            RuntimeError: some have not; the message names them.
        """
        missing = set(range(self._ranks))
        while missing := missing - set(self._signs(missing)):
            if time.monotonic() > until:
                line = f"{named_ranks(missing, ('has', 'have'))} not begun within {start:g} s"
                raise RuntimeError(self._decided(line))
            time.sleep(BEAT / 5)

    def _watch(self) -> None:
        """Give a sign every half a second, and check whether another rank has ended."""
        neighbour = (self.rank + 1) % self._ranks
        seen, since = -1, time.monotonic()
        while not self._line and not self._quiet.wait(BEAT):
            try:
                self._say()
                end = self._own.get(_END).decode() if self._own.check([_END]) else ""
                sign = self._signs([neighbour]).get(neighbour)
                if sign is None or sign.count != seen or sign.state != _HERE:
                    seen, since = sign.count if sign else seen, time.monotonic()
                elif not end and time.monotonic() > since + self._patience:
                    end = self._decided(
                        f"{named_ranks([neighbour])} has given no sign for {self._patience:g} s, {_place(sign)}"
                    )
            except RuntimeError:
                end = self._lost()
            self._line = end

    def _guard(self) -> None:
        """End the process if another rank has ended and this one does not notice. If the rank with the store is stopped, the store
        neither answers nor fails."""
        while not self._over.wait(BEAT):
            silent = time.monotonic() > self._answered + self._patience
            # This rank's own error comes first, as it says where it occurred.
            if silent or (self._line and not self._over.wait(2 * SILENT)):
                line = self._line or self._lost()
                print(f"rank {self.rank}, {_place(self._sign)}, ends here: {line}", file=sys.stderr, flush=True)
                os._exit(1)

    def _decided(self, line: str) -> str:
        """The line that all ranks print: the first one."""
        return self._own.compare_set(_END, "", line).decode()

    def _lost(self) -> str:
        who = "rank 0" if self._hosted else "the launcher"
        return f"{who}, which has the store of all ranks, ended or does not answer"

    def failed(self, error: BaseException) -> str:
        """Tell the others, and find the rank that was the cause: one that gives no sign any more, else the first that failed."""
        text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        try:
            self._say(state=_FAILED, order=self._own.add(_ORDER, 1), text=text)
            others = [rank for rank in range(self._ranks) if rank != self.rank]
            time.sleep(BEAT / 5)  # until the last signs of other ranks have arrived
            before, until = self._signs(others), time.monotonic() + SILENT
            while not self._own.check([_END]):
                now = self._signs(others)
                silent = {rank: one for rank, one in now.items() if one.state == _HERE and one == before.get(rank)}
                if silent and time.monotonic() < until:
                    time.sleep(BEAT / 5)
                    continue
                if silent:
                    places = {rank: _place(sign) for rank, sign in silent.items()}
                    return self._decided(
                        f"{named_ranks(silent)} ended without reporting an error, {places[min(places)]}"
                    )
                every = {self.rank: self._sign, **now}
                rank, sign = min(
                    ((rank, one) for rank, one in every.items() if one.state == _FAILED), key=lambda pair: pair[1].order
                )
                return self._decided(f"rank {rank} failed first, {_place(sign)}: {sign.text}")
            return self._own.get(_END).decode()
        except RuntimeError:  # the rank with the store has ended, perhaps because of what this rank knows already
            return self._line or self._lost()

    def close(self, state: str) -> None:
        """Give no signs after this. The rank with the store ends last."""
        self._quiet.set()
        self._threads[0].join()
        with suppress(RuntimeError):
            if state == _LEFT:
                self._say(state=_LEFT)
            if self._hosted and self.rank == 0:
                until = time.monotonic() + (self._patience if state == _LEFT else 2 * SILENT)
                while time.monotonic() < until and any(
                    one.state == _HERE for one in self._signs(range(1, self._ranks)).values()
                ):
                    time.sleep(BEAT / 5)
        self._over.set()
        self._threads[1].join()


@contextmanager
def watch_ranks(
    backend: str | None = None, *, patience: float = 60.0, start: float = 300.0, **options: Any
) -> Iterator[RankWatch]:
    """Begin the default process group, like `torch.distributed.init_process_group()` under torchrun, and end it. In this context, if a
    rank is killed, stopped, lost or raises, the last line of every other rank names it and the step that it was in.

    Ranks give each other a sign through the group's store, twice a second. A rank with an error waits for a few seconds to learn whether
    another was the cause, and adds that as a note to its error. A rank that waits for an ended one, and gets no error, ends with exit
    code 1.

    Args:
        backend: as for `init_process_group`.
        patience: seconds without a sign of a rank until all others end. A rank that is stopped for a shorter time goes on.
        start: seconds within which all ranks must begin.
        **options: for `init_process_group`, such as `timeout` and `device_id`.

    Yields:
        The watch: `for step in watch.steps(range(1, 101))` records which step a rank is in.

    Raises:
        RuntimeError: some ranks have not begun in time (the message names them), or there is already a process group.
        KeyError: a variable that torchrun sets is missing (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
    """
    if dist.is_initialized():
        raise RuntimeError(
            "the default process group exists already, and watch_ranks creates it: call watch_ranks in place of init_process_group"
        )
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun has the store
    until = time.monotonic() + start
    try:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=hosted and rank == 0,
            timeout=timedelta(seconds=start),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        who = "rank 0" if hosted else "the launcher"
        line = f"{who}, which has the store of all ranks, has not begun within {start:g} s"
        raise RuntimeError(f"rank {rank}, before its first step, ends here: {line}") from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    watch = RankWatch(dist.PrefixStore(f"shardplan/{attempt}", store), rank, ranks, patience, hosted)
    state = _LEFT
    try:
        watch.wait_for_all(start, until)
        dist.init_process_group(
            backend, store=dist.PrefixStore(f"group/{attempt}", store), rank=rank, world_size=ranks, **options
        )
        yield watch
        dist.destroy_process_group()
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            state = _FAILED
            error.add_note(f"rank {rank}, {_place(watch._sign)}, ends here: {watch.failed(error)}")
        raise
    finally:
        watch.close(state)


def _place(sign: _Sign) -> str:
    return f"in step {sign.step}" if sign.step else "before its first step"
