"""Applies changes of rules to the text of a YAML plan. Lines that no change concerns stay as they are, comments too."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from shardplan.core.diagnostics import Edit, Location, Span
from shardplan.core.folded_names import brace, folded, in_last
from shardplan.core.plan import Section, section_path
from shardplan.core.sources import SourceFile

from .nodes import ListNode, MapNode, Node, node_at
from .reader import read_document

# How a plain scalar of YAML cannot begin, and what it cannot contain.
_QUOTED = re.compile(r"^[\s*&!|>'\"%@`{}\[\],?#-]|: | #|:$|\s$")


@dataclass(frozen=True, slots=True)
class _Change:
    """Replaces lines of a text (from 1): `count` lines from `line` on."""

    line: int
    count: int
    new: tuple[str, ...]


def edit_plan(source: SourceFile, edits: Iterable[Edit]) -> tuple[str, tuple[Edit, ...]]:
    """The text of a plan with changes of its rules, and the changes that were made.

    A rule of another file (a parent's) is overridden in this one. A rule that is not written as a block of lines stays
    (in a section in braces, or with comments inside).

    Args:
        source: a YAML plan without findings about its form.
    """
    lines, made = list(source.lines), []
    for edit in dict.fromkeys(edits):
        text = "\n".join(lines)
        root = read_document(text, source.name).root
        assert isinstance(root, MapNode)
        change = _change(lines, root, source.name, edit)
        if change is not None:
            lines[change.line - 1 : change.line - 1 + change.count] = change.new
            made.append(edit)
    return "\n".join(lines), tuple(made)


def _change(lines: list[str], root: MapNode, file: str, edit: Edit) -> _Change | None:
    if edit.location is None or edit.location.file != file:
        return _added(lines, root, edit)
    return _replaced(lines, root, edit, edit.location)


def _added(lines: list[str], root: MapNode, edit: Edit) -> _Change | None:
    """A new rule, the last of its section."""
    entry = f"{quoted_key(edit.pattern)}: {edit.value or 'none'}"
    path = section_path(_section(edit))
    section = node_at(root, path)
    if section is None or (isinstance(section, MapNode) and not section.entries and section.span is None):
        if len(path) > 1 or path[0] in {e.key for e in root.entries}:
            return None
        end = _last_line(lines)
        return _Change(end + 1, 0, (*([""] if lines[end - 1].strip() else []), f"{path[0]}:", f"  {entry}"))
    if not isinstance(section, MapNode) or not section.entries:
        return None
    last = section.entries[-1]
    first = section.entries[0]
    if first.span is None or last.span is None or not begins_line(lines, first.span):
        return None  # in braces
    return _Change(last_line_of(last.value, last.span) + 1, 0, (" " * (first.span.column - 1) + entry,))


def _replaced(lines: list[str], root: MapNode, edit: Edit, location: Location) -> _Change | None:
    """Rewrites the rule itself: the alternatives that stay, then the new rule in place of the others."""
    path = location.path
    value = node_at(root, path)
    key = next((e for e in _entries(root, path[:-1]) if e.key == path[-1]), None)
    if value is None or key is None or key.span is None or not begins_line(lines, key.span):
        return None
    start, end = key.span.line, last_line_of(value, key.span)
    old = lines[start - 1 : end]
    if any("#" in line for line in old[:-1]):
        return None
    indent = " " * (key.span.column - 1)
    comment = _comment(old[-1], value)
    if edit.override:
        flagged = None if edit.value is None else _overriding(edit.value)
        return None if flagged is None else _Change(end + 1, 0, (f"{indent}{quoted_key(edit.pattern)}: {flagged}",))
    head = old[0][: key.span.end_column - 1] if start == key.span.end_line else ""
    rest = [old[0][len(head) :], *old[1:]]
    new: list[str] = []
    for pattern in folded(edit.keep, in_last, brace):
        new += [f"{indent}{quoted_key(pattern)}{rest[0]}", *rest[1:]]
    if edit.value is not None:
        new.append(f"{indent}{quoted_key(edit.pattern)}: {edit.value}{'' if edit.keep else comment}")
    elif not edit.keep and len(_entries(root, path[:-1])) == 1:
        return None  # the section would be empty
    return _Change(start, end - start + 1, tuple(new))


def _section(edit: Edit) -> Section:
    return edit.section  # type: ignore[return-value]


def _entries(root: MapNode, path: tuple[str | int, ...]) -> tuple:
    node = node_at(root, path)
    return node.entries if isinstance(node, MapNode) else ()


def begins_line(lines: list[str], span: Span) -> bool:
    """Whether a key is the first text on its line."""
    return not lines[span.line - 1][: span.column - 1].strip()


def last_line_of(node: Node, key: Span) -> int:
    """The last line of a value."""
    if isinstance(node, MapNode) and node.entries:
        last = node.entries[-1]
        inner = last_line_of(last.value, last.span or key)
    elif isinstance(node, ListNode) and node.items:
        inner = last_line_of(node.items[-1], key)
    else:
        return node.span.end_line if node.span is not None and node.span.end_column > 1 else key.line
    closing = node.span.end_line if node.span is not None and node.span.end_column > 1 else 0
    return max(inner, closing if _closes(node) else 0)


def _closes(node: Node) -> bool:
    """Whether its span ends with a bracket, not at the next token."""
    return node.span is not None and node.span.line == node.span.end_line


def _comment(line: str, value: Node) -> str:
    """The text after a value on its last line."""
    if value.span is None or value.span.line != value.span.end_line:
        return ""
    rest = line[value.span.end_column - 1 :]
    return rest.rstrip() if rest.lstrip().startswith("#") else ""


def _last_line(lines: list[str]) -> int:
    """The number of lines without empty ones at the end."""
    count = len(lines)
    while count > 1 and not lines[count - 1].strip():
        count -= 1
    return count


def _overriding(value: str) -> str:
    inner = value[1:-1] if value.startswith("{") else f"style: {value}"
    return f"{{{inner}, override: true}}"


def quoted_key(pattern: str) -> str:
    """A pattern as a key of a YAML plan."""
    if _QUOTED.search(pattern):
        escaped = pattern.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return pattern
