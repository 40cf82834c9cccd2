"""A document from YAML, JSON or Python: text, numbers, lists and mappings, each with its place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from shardplan.core.diagnostics import Diagnostic, Part, Span
from shardplan.core.sources import SpanKey

Value = str | int | float | bool | None
Path = tuple[str | int, ...]

_LINE_BREAK = re.compile(r"\r\n|[\r\n]")


@dataclass(frozen=True, slots=True)
class Scalar:
    """A single value.

    Args:
        value: what the plan means: a number without a fractional part is an int (1.0 and 1 are one number in JSON).
        text: the text as written, without quotes.
    """

    value: Value
    text: str
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class ListNode:
    """A list."""

    items: tuple[Node, ...]
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A key, as text, with its value."""

    key: str
    value: Node
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class MapNode:
    """A mapping without duplicate keys."""

    entries: tuple[Entry, ...]
    span: Span | None = None

    def get(self, key: str) -> Node | None:
        return next((entry.value for entry in self.entries if entry.key == key), None)


Node = Scalar | ListNode | MapNode


@dataclass(frozen=True, slots=True)
class Document:
    """A reader's result: the root, None if there is none, and the errors of the text."""

    root: Node | None
    findings: tuple[Diagnostic, ...] = ()


def split_lines(text: str) -> tuple[str, ...]:
    """The lines of a text, without their ends."""
    return tuple(_LINE_BREAK.split(text))


def line_starts(text: str) -> list[int]:
    """The index at which each line of a text starts."""
    return [0, *(match.end() for match in _LINE_BREAK.finditer(text))]


def to_data(node: Node) -> object:
    """The node as lists, dicts and plain values."""
    match node:
        case Scalar(value):
            return value
        case ListNode(items):
            return [to_data(item) for item in items]
        case MapNode(entries):
            return {entry.key: to_data(entry.value) for entry in entries}


def node_at(root: Node, path: Path) -> Node | None:
    """The node at a path; None if there is none."""
    node: Node | None = root
    for step in path:
        if isinstance(node, MapNode) and isinstance(step, str):
            node = node.get(step)
        elif isinstance(node, ListNode) and isinstance(step, int) and step < len(node.items):
            node = node.items[step]
        else:
            return None
    return node


def spans(root: Node) -> dict[SpanKey, Span]:
    """The place of every key and value of a document; the root's key is at the document's beginning."""
    places: dict[SpanKey, Span] = {}
    for path, part, span in _places(root, ()):
        if span is not None:
            places[path, part] = span
    if root.span is not None:
        start = root.span
        places[(), "key"] = Span(start.line, start.column, start.line, start.column)
    return places


def _places(node: Node, path: Path) -> Iterator[tuple[Path, Part, Span | None]]:
    yield path, "value", node.span
    match node:
        case ListNode(items):
            for i, item in enumerate(items):
                yield from _places(item, (*path, i))
        case MapNode(entries):
            for entry in entries:
                yield (*path, entry.key), "key", entry.span
                yield from _places(entry.value, (*path, entry.key))
