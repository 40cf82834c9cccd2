"""The width of text on a terminal: tabs, wide and combining characters, and characters that must never reach
a terminal."""

from __future__ import annotations

import re
import unicodedata

TAB = 4
HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})  # categories that move, hide or reorder the text after them
JOINER = "\u200d"
_KEPT = re.compile(r"(\n|\t)")
_KEPT_IN_COLOR = re.compile(r"(\x1b\[[0-9]+(?:;[0-9]+)*m|\n|\t)")
_PLAIN = re.compile(r"[\n\t -~]*")


def printable(text: str) -> str:
    """The text on one line, with control characters replaced by visible ones, so that a plan cannot
    control the terminal."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(" " if char == "\t" else _visible(char) for char in text)


def printable_lines(text: str, *, colors: bool = False) -> str:
    """The text with each line made `printable`; tabs stay and, with `colors`, `Paint`'s escapes too."""
    if _PLAIN.fullmatch(text):
        return text
    kept = _KEPT_IN_COLOR if colors else _KEPT
    return "".join(piece if kept.fullmatch(piece) else printable(piece) for piece in kept.split(text))


def cells(text: str) -> tuple[list[str], list[int]]:
    """Each character as it is printed (a tab as spaces), and the display columns, from 0, of all characters
    and of the end."""
    pieces: list[str] = []
    starts = [0]
    for char in text:
        column = starts[-1]
        piece = " " * (TAB - column % TAB) if char == "\t" else _visible(char)
        pieces.append(piece)
        starts.append(column + display_width(piece))
    return pieces, starts


def display_width(text: str) -> int:
    """The number of terminal columns that printable text takes."""
    return len(text) if text.isascii() else sum(map(_width, text))


def _visible(char: str) -> str:
    if ord(char) < 0x20:
        return chr(0x2400 + ord(char))  # the pictures of control characters
    if ord(char) == 0x7F:
        return "\u2421"
    return "\ufffd" if is_hidden(char) else char


def is_hidden(char: str) -> bool:
    """Whether a terminal obeys a character instead of showing it."""
    return unicodedata.category(char) in HIDDEN and char != JOINER


def _width(char: str) -> int:
    if unicodedata.category(char) in {"Mn", "Me", "Cf"}:
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
