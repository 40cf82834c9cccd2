"""Running commands and showing them."""

import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {
    **os.environ,
    # `examples/train.py` is run as a script, from a checkout in which shardplan may not be installed.
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    "OMP_NUM_THREADS": "1",  # the processes share the cores
}


def heading(text: str) -> None:
    print(f"\n{text}\n{'=' * len(text)}", flush=True)


def say(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)


class Progress:
    """One line that is rewritten on a terminal and erased at the end; elsewhere, said once."""

    def __init__(self, what: str) -> None:
        self.what, self.note, self.start = what, "", time.monotonic()
        self._on_terminal = sys.stdout.isatty()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> "Progress":
        if self._on_terminal:
            self._thread.start()
        else:
            print(f"... {self.what}", flush=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        if self._on_terminal:
            self._thread.join()
            print("\r\x1b[K", end="", flush=True)

    def _tick(self) -> None:
        while not self._done.wait(0.5):
            seconds = time.monotonic() - self.start
            print(f"\r\x1b[K... {self.what} {self.note}({seconds:.0f} s)", end="", flush=True)


def run(*words: str, expect: int) -> bool:
    """Run `shardplan`, show the command line and what it prints. Returns whether the exit code is the expected one."""
    print(f"\n$ shardplan {shlex.join(words)}", flush=True)
    with Progress("running"):
        code, output = execute([sys.executable, "-m", "shardplan", *words])
    print(output.rstrip(), flush=True)
    print(f"exit code {code}" if code == expect else f"exit code {code}, but {expect} was announced", flush=True)
    return code == expect


def execute(command: Sequence[str], on_line: Callable[[str], None] = lambda line: None) -> tuple[int, str]:
    """Run a command in the project's root. What it wrote to standard error is printed if it was ended by a signal or
    says more than the exit codes 0 and 1.

    Returns:
        The exit code and the standard output.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8"
        )
        lines = []
        for line in process.stdout:
            lines.append(line)
            on_line(line)
        code = process.wait()
        if code not in (0, 1) or (code and not lines):
            errors.seek(0)
            print(errors.read(), file=sys.stderr, flush=True)
    return code, "".join(lines)
