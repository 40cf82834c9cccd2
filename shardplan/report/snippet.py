"""Lines of a plan with marks under them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardplan.core.by_key import by_key
from shardplan.core.diagnostics import Span
from shardplan.core.sources import SourceFile

from .color import Paint, Role
from .width import cells, printable

GUTTER = 4  # digits of a line number; longer numbers get more
WIDTH = 110  # columns of a source line; a longer line is cut around the first mark
LEAD = 20  # columns before the first mark, in a line that is cut on its left
CUT = "..."


@dataclass(frozen=True, slots=True)
class Mark:
    """A span to underline, and the text next to it. The primary mark is drawn with carets."""

    span: Span
    text: str
    primary: bool
    role: Role


@dataclass(frozen=True, slots=True)
class _Stroke:
    """A mark on the shown line: display columns from 0; `end` is one past the last."""

    start: int
    end: int
    mark: Mark


def gutter_width(marks: Iterable[Mark]) -> int:
    """The columns for line numbers in a snippet with these marks."""
    return max([GUTTER, *(len(str(mark.span.line)) for mark in marks)])


def snippet(source: SourceFile, marks: Iterable[Mark], width: int, paint: Paint) -> list[str]:
    """The marked lines in order, each with its marks below it; `...` is shown for lines that are left out
    between them."""
    by_line = by_key((mark.span.line, mark) for mark in sorted(marks, key=lambda mark: mark.span.line))
    bar = paint("gutter", " " * width + " |")
    lines: list[str] = []
    previous = None
    for number, on_line in by_line.items():
        if previous is not None and number > previous + 1:
            lines.append(paint("gutter", " " * (width - 3) + CUT))
        shown, strokes = _place(source.lines[number - 1] if number <= len(source.lines) else "", on_line)
        lines.append(f"{paint('gutter', f'{number:>{width}} |')} {shown}".rstrip())
        lines += [f"{bar} {row}" for row in _rows(strokes, paint)]
        previous = number
    return lines


def _place(text: str, marks: Sequence[Mark]) -> tuple[str, list[_Stroke]]:
    """The line as shown, cut where it is too long, and the positions of its marks."""
    pieces, starts = _cells(text)
    ends = [_character_range(mark.span, len(pieces)) for mark in marks]
    left, right = _window(starts, min(first for first, _ in ends))
    prefix, suffix = (CUT if left else ""), (CUT if right < len(pieces) else "")
    shown = prefix + "".join(pieces[left:right]) + suffix
    offset = len(prefix) - starts[left]
    strokes = []
    for (first, last), mark in zip(ends, marks, strict=True):
        start = starts[min(first, right)] + offset
        strokes.append(_Stroke(start, max(starts[min(last, right)] + offset, start + 1), mark))
    return shown, strokes


@lru_cache(maxsize=4)
def _cells(text: str) -> tuple[Sequence[str], Sequence[int]]:
    """The cells of a line. They are cached, as thousands of findings may be on one line of a megabyte."""
    return cells(text.rstrip())


def _character_range(span: Span, length: int) -> tuple[int, int]:
    """The marked characters of the span's first line; a span over several lines is marked to the end of its
    first line."""
    first = min(span.column - 1, length)
    last = span.end_column - 1 if span.end_line == span.line else length
    return first, min(max(last, first), length)


def _window(starts: Sequence[int], first: int) -> tuple[int, int]:
    """The range of characters to show: all, or those that fit, from a little before the character `first`."""
    length = len(starts) - 1
    if starts[length] <= WIDTH:
        return 0, length
    left = 0
    if starts[first] > WIDTH // 2:
        left = bisect_left(starts, starts[first] - LEAD)
    room = starts[left] + WIDTH - 2 * len(CUT)
    return left, min(bisect_right(starts, room, left + 1) - 1, length)


def _rows(strokes: Sequence[_Stroke], paint: Paint) -> list[str]:
    """The row of carets and dashes with the last mark's text next to it; the other texts are below, last first."""
    order = sorted(strokes, key=lambda stroke: (stroke.end, stroke.start))
    signs: list[tuple[str, Role]] = [(" ", "strong")] * order[-1].end
    for stroke in sorted(order, key=lambda stroke: stroke.mark.primary):
        sign = "^" if stroke.mark.primary else "-"
        signs[stroke.start : stroke.end] = [(sign, stroke.mark.role)] * (stroke.end - stroke.start)
    *others, last = order
    rows = [f"{_runs(signs, paint)} {_text(last.mark, paint)}".rstrip()]
    hanging = [stroke for stroke in others if stroke.mark.text]
    while hanging:
        stroke = hanging.pop()
        bars = {other.start: other.mark.role for other in hanging if other.start < stroke.start}
        lead = "".join(paint(bars[i], "|") if i in bars else " " for i in range(stroke.start))
        rows.append(lead + _text(stroke.mark, paint))
    return rows


def _runs(signs: Sequence[tuple[str, Role]], paint: Paint) -> str:
    """The signs, where each run with the same role is painted at once."""
    runs: list[tuple[str, Role]] = []
    for sign, role in signs:
        if runs and runs[-1][1] == role:
            runs[-1] = (runs[-1][0] + sign, role)
        else:
            runs.append((sign, role))
    return "".join(text if text.isspace() else paint(role, text) for text, role in runs)


def _text(mark: Mark, paint: Paint) -> str:
    return paint(mark.role, printable(mark.text))
