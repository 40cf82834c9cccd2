"""What commands print, and the exit code that follows from it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from shutil import get_terminal_size
from typing import TextIO

from shardplan.core.report import Report
from shardplan.report import report_text, text, wants_color

from .exits import CLEAN, FINDINGS, UsageError


def finish(report: Report, args: argparse.Namespace) -> int:
    """Print the report as the options want it. Raises UsageError where the SARIF file cannot be written."""
    if getattr(args, "sarif", None):
        from shardplan.report import json_text, to_sarif

        write_file(args.sarif, json_text(to_sarif(report)) + "\n")
    if getattr(args, "github", False):
        from shardplan.report.github import github_lines

        if args.json:
            raise UsageError("--github prints text: it does not go with --json")
        print("".join(f"{line}\n" for line in github_lines(report)), end="")
    if getattr(args, "json", False):
        from shardplan.report import json_text, to_json

        print(json_text(to_json(report)))
    else:
        print(report_text(report, color=wants_color(sys.stdout), verbose=getattr(args, "verbose", False)))
    return CLEAN if report.ok else FINDINGS


def warn(report: Report) -> None:
    """Print the warnings of a clean report, and what `auto` derived, to stderr, beside what the command prints."""
    if report.derived is not None:
        print(*report.derived.lines, sep="\n", file=sys.stderr)
    if report.diagnostics:
        print(text(report.diagnostics, report.sources, color=wants_color(sys.stderr)) + "\n", file=sys.stderr)


def columns(stream: TextIO) -> int | None:
    """The columns of the terminal that the stream is, None where it is none."""
    return get_terminal_size().columns if stream.isatty() else None


def write_file(name: str, content: str) -> None:
    """Raises UsageError where it cannot be written."""
    try:
        Path(name).write_text(content, encoding="utf-8", newline="")
    except OSError as error:
        raise UsageError(f"cannot write {name}: {error.strerror or error}") from None


def progress(step: str) -> None:
    """A line on stderr that the next one replaces, an empty one removes; only on a terminal."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"\r\x1b[K{step[: get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)


class Bar:
    """As `progress`, with a bar before each text: how much of the work is done."""

    WIDTH = 24

    def __init__(self) -> None:
        self._share, self._text = 0.0, ""

    def advance(self, done: int, total: int) -> None:
        """Draw the bar anew; it never goes back where more work turns up."""
        self._share = max(self._share, done / total)
        self._draw()

    def progress(self, text: str) -> None:
        self._text = text
        self._draw()

    def _draw(self) -> None:
        full = round(self._share * self.WIDTH)
        progress(f"[{'#' * full}{'.' * (self.WIDTH - full)}] {self._share:4.0%} {self._text}")
