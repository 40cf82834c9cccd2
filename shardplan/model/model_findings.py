"""Making the errors of finding a model."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable

from shardplan.core.diagnostics import Code, Diagnostic, Label, Location, PlanError, Severity

MOST_CAUSES = 4


def refuse(
    code: Code, message: str, *, help: str | None = None, notes: tuple[str, ...] = (), file: str | None = None
) -> PlanError:
    """The error to raise, with one finding; it points at the model's configuration file if there is one."""
    return PlanError((finding(code, message, help=help, notes=notes, file=file),))


def finding(
    code: Code,
    message: str,
    *,
    severity: Severity = Severity.ERROR,
    help: str | None = None,
    notes: tuple[str, ...] = (),
    file: str | None = None,
) -> Diagnostic:
    primary = Label(Location(file)) if file is not None else None
    return Diagnostic(code, severity, message, primary=primary, notes=notes, help=help)


def nearest(word: str, known: Iterable[str], count: int = 3) -> tuple[str, ...]:
    """The known words that look like the given one, the most similar first."""
    return tuple(difflib.get_close_matches(word.lower(), sorted(known), n=count, cutoff=0.6))


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """`did you mean a, b or c?`, or None where nothing is near."""
    return joined(nearest(word, known))


def joined(words: tuple[str, ...]) -> str | None:
    if not words:
        return None
    quoted = [f"`{word}`" for word in words]
    return "did you mean " + " or ".join([", ".join(quoted[:-1]), quoted[-1]] if quoted[1:] else quoted) + "?"


def causes(error: BaseException) -> tuple[str, ...]:
    """An exception and its causes, one line each; an exception without a text is shown with the line of code that raised it."""
    lines: list[str] = []
    seen: BaseException | None = error
    while seen is not None and len(lines) < MOST_CAUSES:
        lines.append(reason(seen) if str(seen).strip() else f"{reason(seen)}{_place(seen)}")
        seen = seen.__cause__
    return tuple(lines)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}".rstrip(": ") if frames else ""


def reason(error: BaseException) -> str:
    """An exception in one line: its type, and the first non-empty line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = ": ".join(lines[:2]) if lines and lines[0].endswith(":") else (lines[0] if lines else "")
    text = text.replace("::", ":")
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
