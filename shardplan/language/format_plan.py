"""Formats a plan's text: indentation, spaces and empty lines. Words, their order, quotes and comments stay."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .nodes import Entry, ListNode, MapNode, Node, Scalar, split_lines, to_data
from .reader import read_document

STEP = 2  # columns of a level


@dataclass
class _Layout:
    """The facts about a text's lines, counted from 1.

    Args:
        level: line -> its level, if a key or an item of a list begins there.
        moved: continuation line of a value -> the line where the value begins.
        kept: lines inside of multi-line text, where blanks may count.
        keys: line -> the entry that begins there.
        sections: lines of the keys of the root whose value is a block.
    """

    level: dict[int, int] = field(default_factory=dict)
    moved: dict[int, int] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    keys: dict[int, Entry] = field(default_factory=dict)
    sections: set[int] = field(default_factory=set)


def format_plan(text: str, file: str = "<text>") -> str:
    """The text of a YAML plan, formatted. It stays the same if it is formatted already, is not YAML, or cannot be
    formatted without changing its meaning.

    Entries are indented by two blanks a level. One blank follows a colon, two come before a comment on a line with other text,
    and one follows its mark. One empty line comes before each section, and never two together. The text ends with one line end.
    """
    root = read_document(text, file).root
    if not isinstance(root, MapNode) or not root.entries:
        return text
    lines = list(split_lines(text))
    layout = _Layout()
    for _ in _walk(root, 0, layout, lines):
        pass
    made = "\n".join(_spaced(_indented(lines, layout), layout)) + "\n"
    again = read_document(made, file).root
    if again is None or to_data(again) != to_data(root) or comments(made) != comments(text):
        return text
    return made


def _walk(node: Node, level: int, layout: _Layout, lines: list[str]) -> Iterator[None]:
    """Note the lines of a block."""
    match node:
        case MapNode(entries):
            for entry in entries:
                if entry.span is None or not _block(lines, entry.span.line, entry.span.column):
                    continue
                line = entry.span.line
                layout.level[line], layout.keys[line] = level, entry
                if level == 0 and isinstance(entry.value, MapNode) and _opens_below(entry):
                    layout.sections.add(line)
                yield from _value(entry.value, line, level, layout, lines)
        case ListNode(items):
            for item in items:
                if item.span is None or not lines[item.span.line - 1].lstrip().startswith("-"):
                    continue
                begin = item.span.line
                layout.level[begin] = level
                for inside in range(begin + 1, _deepest(item, begin) + 1):  # the item moves as a whole
                    layout.moved[inside] = begin
                    if isinstance(item, Scalar):
                        layout.kept.add(inside)


def _value(value: Node, line: int, level: int, layout: _Layout, lines: list[str]) -> Iterator[None]:
    yield
    if isinstance(value, Scalar):
        if value.span is not None:
            for inside in range(line + 1, _last(value) + 1):
                layout.moved[inside] = line
                layout.kept.add(inside)
        return
    in_braces = value.span is not None and lines[value.span.line - 1][value.span.column - 1 : value.span.column] in (
        "{",
        "[",
    )
    if in_braces:
        for inside in range(line + 1, _last(value) + 1):
            layout.moved[inside] = line
        return
    yield from _walk(value, level + 1, layout, lines)


def _last(node: Node) -> int:
    """The last line of a value. A span that ends at the beginning of a line does not include that line."""
    assert node.span is not None
    return node.span.end_line if node.span.end_column > 1 else node.span.end_line - 1


def _deepest(node: Node, line: int) -> int:
    """The last line of a node, without anything between it and the next node."""
    match node:
        case MapNode(entries) if entries:
            lasts = (_deepest(entry.value, entry.span.line if entry.span else line) for entry in entries)
            return max(line, *lasts)
        case ListNode(items) if items:
            return max(line, *(_deepest(item, line) for item in items))
    return max(line, _last(node)) if node.span is not None else line


def _block(lines: list[str], line: int, column: int) -> bool:
    return not lines[line - 1][: column - 1].strip()


def _opens_below(entry: Entry) -> bool:
    assert isinstance(entry.value, MapNode) and entry.span is not None
    first = entry.value.entries[0] if entry.value.entries else None
    return first is not None and first.span is not None and first.span.line > entry.span.line


def _indented(lines: list[str], layout: _Layout) -> list[str]:
    """The lines with their blanks; their number does not change."""
    made: list[str] = []
    shift: dict[int, int] = {}
    following = _levels_below(lines, layout)
    for number, line in enumerate(lines, 1):
        begin = len(line) - len(line.lstrip())
        if number in layout.level:
            indent = STEP * layout.level[number]
            shift[number] = indent - begin
            made.append(" " * indent + _content(line, layout.keys.get(number)))
        elif number in layout.moved:
            delta = shift.get(layout.moved[number], 0)
            kept = line if number in layout.kept else line.rstrip()
            made.append(kept if not line.strip() else " " * max(0, begin + delta) + kept[begin:])
        elif line.strip().startswith("#"):
            made.append(" " * (STEP * following[number]) + _comment(line.strip()))
        else:
            made.append(line.strip())
    return made


def _levels_below(lines: list[str], layout: _Layout) -> dict[int, int]:
    """Line -> the level that a comment there gets: that of the next line that has one."""
    levels, level = {}, 0
    for number in range(len(lines), 0, -1):
        level = layout.level.get(number, level)
        levels[number] = level
    return levels


def _content(line: str, entry: Entry | None) -> str:
    """A line with one blank after its key and two before its comment."""
    if entry is None or entry.span is None or entry.span.line != entry.span.end_line:
        return line.strip()
    key = line[entry.span.column - 1 : entry.span.end_column - 1]
    colon, rest = (
        line[entry.span.end_column - 1 :].split(":", 1) if ":" in line[entry.span.end_column - 1 :] else ("x", "")
    )
    if colon.strip():
        return line.strip()
    value = entry.value.span
    rest = rest.strip()
    if value is not None and value.line == value.end_line == entry.span.line and rest and not rest.startswith("#"):
        after = line[value.end_column - 1 :].strip()
        text = line[: value.end_column - 1][entry.span.end_column - 1 :].split(":", 1)[1].strip()
        return f"{key}: {text}" + (f"  {_comment(after)}" if after.startswith("#") else after)
    if rest.startswith("#"):
        return f"{key}:  {_comment(rest)}"
    return f"{key}: {rest}" if rest else f"{key}:"


def _comment(text: str) -> str:
    """A comment with a blank after its mark."""
    return re.sub(r"^#(?=[^\s#!])", "# ", text)


def _spaced(lines: list[str], layout: _Layout) -> list[str]:
    """One empty line before each section and the comments above it, never two together, none at the ends."""
    made: list[str] = []
    for number, line in enumerate(lines, 1):
        if number in layout.kept:
            made.append(line)
            continue
        if not line and (not made or not made[-1]):
            continue
        if number in layout.sections:
            above = len(made)
            while above and made[above - 1].startswith("#"):
                above -= 1
            if above and made[above - 1]:
                made.insert(above, "")
        made.append(line)
    while made and not made[-1]:
        made.pop()
    return made


def comments(text: str) -> list[str]:
    """The text after each mark of a comment, roughly: enough to see that none is lost."""
    return [re.sub(r"\s", "", line.partition("#")[2]) for line in text.splitlines() if "#" in line]
