"""Running parts one after the other, and writing what they tell at once. The standard library alone."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .rows import MARK
from .summary import summary
from .table import Part

ROOT = Path(__file__).parents[2]
LEAST = 10.0  # seconds: with less, no part is begun
LOG_BYTES = 8_000_000
ON_CPU = 6  # times a part's seconds: time-outs are for a GPU and 16 cores
KEPT = 25  # last lines of a part's output, in its record
MARKER = "SHARDPLAN_GPU_PART"  # in the environment of every process of a part
# The part ends when we are killed, whatever it is doing (PR_SET_PDEATHSIG).
STARTER = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL); os.execvp(sys.argv[1], sys.argv[1:])"
)


class Results:
    """The files: results.jsonl, a record a line, each on the disk before anything else runs; summary.md, made anew after each
    part; log.txt, what the parts print.

    Raises:
        FileExistsError: the folder has results.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._records = os.open(folder / "results.jsonl", flags, 0o644)
        self._log = os.open(folder / "log.txt", flags, 0o644)
        self._logged = 0
        self.all: list[dict[str, Any]] = []

    def add(self, **record: Any) -> None:
        self.all.append(record)
        os.write(self._records, (json.dumps(record) + "\n").encode())
        os.fsync(self._records)

    def log(self, text: bytes) -> None:
        if self._logged < LOG_BYTES:
            self._logged += os.write(self._log, text[: LOG_BYTES - self._logged])

    def summarize(self, parts: Sequence[Part]) -> None:
        made = self.folder / "summary.md.new"
        made.write_text(summary(self.all, parts), "utf-8")
        made.replace(self.folder / "summary.md")

    def close(self) -> None:
        os.close(self._records)
        os.close(self._log)


def run_parts(
    parts: Sequence[Part], results: Results, device: str, seconds: float, environment: Mapping[str, str]
) -> bool:
    """Run all parts; whether each passed or was skipped.

    Args:
        device: cuda or cpu.
        seconds: for all of them.
        environment: of the parts, in addition to ours.
    """
    end, fine = time.monotonic() + seconds, True
    for part in parts:
        command = [device if word == "DEVICE" else word for word in part.command]
        left = end - time.monotonic()
        if part.needs_cuda and device != "cuda":
            outcome = Outcome("skipped", "no CUDA device")
        elif left < LEAST:
            outcome = Outcome("not run", f"{max(0.0, left):.0f} s were left")
        else:
            print(f"{part.name} ...", end=" ", file=sys.stderr, flush=True)
            limit = part.seconds * (ON_CPU if device == "cpu" else 1)
            outcome = _run(part, command, min(limit, left), results, {**os.environ, **environment})
            print(f"{outcome.status}{outcome.why and ': '}{outcome.why}, {outcome.seconds:.0f} s", file=sys.stderr)
        results.add(part=part.name, command=command, **outcome.record())
        results.summarize(parts)
        fine = fine and outcome.status in ("passed", "skipped")
    return fine


@dataclass
class Outcome:
    """What became of a part: passed, failed, timed out, skipped, not run."""

    status: str
    why: str = ""
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        return {"status": self.status, "why": self.why, "seconds": round(self.seconds, 1), "output": self.lines[-KEPT:]}


def _run(
    part: Part, command: Sequence[str], seconds: float, results: Results, environment: Mapping[str, str]
) -> Outcome:
    marker = f"{MARKER}={uuid.uuid4()}"
    name, value = marker.split("=")
    results.log(f"\n===== {part.name}: {' '.join(command)}\n".encode())
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", STARTER, *command],
        cwd=ROOT,
        env={**environment, name: value, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    lines: list[str] = []
    wrong = 0
    try:
        for text in _lines(process, start + seconds):
            if text.startswith(MARK):
                row = _row(text)
                wrong += row.get("ok") is False
                results.add(part=part.name, row=row)
            elif text.strip():
                lines.append(text)
                results.log(text.encode() + b"\n")
        ended = process.poll()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        kill_all(marker)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    taken = time.monotonic() - start
    if ended is None:
        return Outcome(
            "timed out", f"killed after {seconds:.0f} s" + (f"; {wrong} wrong rows" if wrong else ""), taken, lines
        )
    if ended:
        return Outcome("failed", f"exit code {ended}", taken, lines)
    return Outcome("failed", f"{wrong} wrong rows", taken, lines) if wrong else Outcome("passed", "", taken, lines)


def _row(text: str) -> dict[str, Any]:
    try:
        row = json.loads(text.removeprefix(MARK))
    except ValueError:
        row = None
    return row if isinstance(row, dict) else {"ok": False, "error": f"this row is not JSON: {text}"}


def _lines(process: subprocess.Popen[bytes], end: float) -> Iterator[str]:
    """The lines of a process as they come, until it has ended or the time has come. What it started may hold the pipe open."""
    assert process.stdout is not None
    pipe, rest = process.stdout.fileno(), b""
    os.set_blocking(pipe, False)
    while True:
        ended = process.poll() is not None  # before reading: what it wrote is then there
        if select.select([pipe], [], [], 0.0 if ended else 0.1)[0]:
            chunk = os.read(pipe, 65536)
            *whole, rest = (rest + chunk).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
            if not chunk and not ended:
                time.sleep(0.1)  # it closed its output, and runs on
        else:
            chunk = b""
        if (ended and not chunk) or time.monotonic() > end:
            break
    if rest:
        yield rest.decode(errors="replace")


def kill_all(marker: str) -> None:
    """Kill every process whose environment has a marker, whoever its parent, its group and its session are by now."""
    while found := [pid for pid in _processes() if marker.encode() in _environment(pid)]:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _environment(pid: int) -> list[bytes]:
    """Of a process that runs; a dead one that nobody waited for has none."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
