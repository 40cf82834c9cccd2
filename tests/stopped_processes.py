"""Processes that stop before each of their operations on the disk, until the test lets them continue, or kills them.

They are threads of this process. A thread that is killed does nothing more: each operation that it still tries raises.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

OPERATIONS = ("rename", "mkdir", "open", "unlink", "rmdir", "listdir", "lstat")
_here = threading.local()


class Killed(BaseException):
    """The process ends: nothing after it runs."""


class Process:
    """Something that runs until its next operation each time `step` is called."""

    def __init__(self, act: Callable[[], Any]):
        self.act = act
        self.error: BaseException | None = None
        self.begun = self.ended = self.killed = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def succeeded(self) -> bool:
        return self.ended and self.error is None

    def _run(self) -> None:
        _here.process = self
        try:
            self.act()
        except BaseException as error:
            self.error = error
        self.ended = True
        self._stopped.release()

    def step(self) -> bool:
        """Do one operation, and stop before the next; whether there is one."""
        if self.ended:
            return False
        if self.begun:
            self._go.release()
        else:
            self.begun = True
            self._thread.start()
        self._stopped.acquire()
        return not self.ended

    def steps(self, count: int) -> bool:
        return all(self.step() for _ in range(count))

    def to_end(self) -> None:
        while self.step():
            pass

    def kill(self) -> None:
        self.killed = True
        self.to_end()

    def stop(self) -> None:
        """Called by the process itself, before an operation."""
        if not self.killed:
            self._stopped.release()
            self._go.acquire()
        if self.killed:
            raise Killed


def stop() -> None:
    """Stop here, in a process of the test; elsewhere it does nothing."""
    process = getattr(_here, "process", None)
    if process is not None:
        process.stop()


@contextmanager
def stopping(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Operations stop before they are done. A removal of a folder is one; a kill in it leaves it half done."""

    def stopped(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            if not getattr(_here, "inside", False):
                stop()
            return operation(*args, **options)

        return run

    def remove(path: Path, **options: Any) -> None:
        if getattr(_here, "process", None) is None:
            return rmtree(path, **options)
        stop()
        _here.inside = True
        try:
            for file in [file for file in sorted(Path(path).iterdir()) if file.is_file()][:1]:
                file.unlink()
            _here.inside = False
            stop()
            _here.inside = True
            rmtree(path, **options)
        finally:
            _here.inside = False

    rmtree = shutil.rmtree
    with monkeypatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(os, name, stopped(getattr(os, name)))
        patch.setattr(shutil, "rmtree", remove)
        patch.setattr(os, "fsync", lambda number: None)
        yield
