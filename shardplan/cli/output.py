"""The output of commands, their exit codes, and other functions that commands share."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from pathlib import Path
from shutil import get_terminal_size
from typing import TextIO

from shardplan.core.report import Report
from shardplan.core.user_files import CannotRead, read_bytes, write_whole
from shardplan.report import report_text, text, wants_color
from shardplan.report.width import printable, printable_lines

from .exits import CLEAN, FINDINGS, UsageError


def finish(report: Report, args: argparse.Namespace) -> int:
    """Print the report in the form that the options ask for. Raises UsageError where the SARIF file cannot be written."""
    if getattr(args, "sarif", None):
        from shardplan.report import json_text, to_sarif

        write_file(args.sarif, json_text(to_sarif(report)) + "\n")
    if getattr(args, "github", False):
        from shardplan.report.github import github_lines

        if args.json:
            raise UsageError("--github prints text: it does not go with --json")
        show("".join(f"{line}\n" for line in github_lines(report)), end="")
    if getattr(args, "json", False):
        from shardplan.report import json_text, to_json

        put(json_text(to_json(report, proof=args.command == "verify")))
    else:
        show(report_text(report, color=wants_color(sys.stdout), verbose=getattr(args, "verbose", False)))
    return CLEAN if report.ok else FINDINGS


def keep_existing(args: argparse.Namespace) -> None:
    """Raise UsageError where `--output` names an existing file, without `--force`."""
    if args.output is not None and Path(args.output).exists() and not args.force:
        raise UsageError(f"{args.output} exists; --force overwrites it")


def deliver(document: str | None, report: Report, args: argparse.Namespace, written: str, *, note: str = "") -> int:
    """Write a document to `--output`, or print it; with the findings of its report.

    Args:
        document: None where none was made: the report says why.
        written, note: the message about it: for a file, and on stderr when the document goes to stdout.
    """
    if document is None:
        return finish(report, args)
    if args.output is not None:
        write_file(args.output, document)
        say(f"{args.output}: {written}")
        return finish(report, args)
    if args.json:
        return finish(report, args)
    put(document, end="")
    if note:
        say(note)
    if report.diagnostics:
        show(report_text(report, color=wants_color(sys.stderr)), stream=sys.stderr)
    return CLEAN if report.ok else FINDINGS


def collect_garbage() -> None:
    """Start garbage collection, which `main.console` delays; call it before work that leaves much garbage. Imported objects are not collected."""
    gc.freeze()
    gc.enable()


def warn(report: Report) -> None:
    """Print the warnings of a clean report, and what `auto` derived, to stderr, in addition to what the command prints."""
    if report.derived is not None:
        say("\n".join(report.derived.lines))
    if report.diagnostics:
        show(text(report.diagnostics, report.sources, color=wants_color(sys.stderr)) + "\n", stream=sys.stderr)


def columns(stream: TextIO) -> int | None:
    """The columns of the terminal, if the stream is one; else None."""
    return get_terminal_size().columns if stream.isatty() else None


def write_file(name: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file completely or not at all. Raises UsageError where it cannot be written."""
    try:
        write_whole(name, content)
    except OSError as error:
        raise UsageError(f"cannot write {os.fspath(name)}: {error.strerror or error}") from None


def read_file(name: str | os.PathLike[str], most: int) -> bytes:
    """The content of a regular file. Raises UsageError where it cannot be read."""
    try:
        return read_bytes(name, most)
    except CannotRead as error:
        raise UsageError(f"{os.fspath(name)} {error.reason}") from None


def say(text: str) -> None:
    """Print lines on stderr. Names from files or arguments in them cannot control the terminal."""
    print(printable_lines(text), file=sys.stderr)


def show(text: str, end: str = "\n", stream: TextIO | None = None) -> None:
    """Print a report on stdout, or another stream. Names in it cannot control the terminal."""
    stream = stream or sys.stdout
    print(printable_lines(text, colors=wants_color(stream)), end=end, file=stream, flush=stream.isatty())


def put(text: str, end: str = "\n") -> None:
    """Print a document on stdout: unchanged to a file or a pipe, and to a terminal as `show` prints it."""
    print(printable_lines(text) if sys.stdout.isatty() else text, end=end)


def progress(step: str) -> None:
    """Print a line on stderr, only on a terminal; the next line replaces it, and an empty one removes it."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"\r\x1b[K{printable(step)[: get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)


class Bar:
    """As `progress`, with a bar before each text that shows how much of the work is done."""

    WIDTH = 24

    def __init__(self) -> None:
        self._share, self._text = 0.0, ""

    def advance(self, done: int, total: int) -> None:
        """Draw the bar again; it never goes back, even where the amount of work grows."""
        self._share = max(self._share, done / total)
        self._draw()

    def progress(self, text: str) -> None:
        self._text = text
        self._draw()

    def _draw(self) -> None:
        full = round(self._share * self.WIDTH)
        progress(f"[{'#' * full}{'.' * (self.WIDTH - full)}] {self._share:4.0%} {self._text}")
