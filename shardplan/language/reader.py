"""The text of a document, YAML or JSON -> nodes.

The YAML library, or `json_events`, gives events and their marks. Their meaning is decided here: keys are text; plain
scalars follow the core schema of YAML 1.2, which includes JSON's; a tag never constructs anything. Nesting, the number
of nodes and the repetitions by aliases are limited while reading.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

import yaml

from shardplan.core.diagnostics import Diagnostic, Span

from .json_events import json_events
from .limits import MAX_DEPTH, MAX_NODES
from .nodes import Document, Entry, ListNode, MapNode, Node, Scalar, split_lines
from .parse_findings import quoted
from .scalars import TAGS, TEXT_TAGS, resolve
from .syntax import Unreadable, note_duplicate, refuse, refuse_depth, refuse_nodes

# Not allowed in YAML; and U+0085, U+2028 and U+2029, which the scanner takes for line breaks, as in YAML 1.1.
_NOT_TEXT = re.compile("[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_QUOTE = "put quotes around a pattern that begins with `*`, `{`, `[`, `?`, `!` or `&`"
_HELP = {
    "mapping values are not allowed in this context": "put quotes around text that holds `: `, or fix the indentation",
    "did not find expected alphabetic or numeric character": _QUOTE,
    "did not find expected key": f"fix the indentation; {_QUOTE}",
    "did not find expected ',' or '}'": _QUOTE,
    "did not find expected ',' or ']'": _QUOTE,
    "did not find expected <document start>": _QUOTE,
    "found character that cannot start any token": "indent with spaces, not with tabs; put quotes around "
    "text that begins with `@`, `` ` `` or `%`",
    "found a tab character where an indentation space is expected": "indent with spaces, not with tabs",
}


@dataclass(slots=True)
class _Open:
    """A list or mapping that is being read."""

    start: Span
    mapping: bool
    flow: bool
    anchor: str | None
    items: list[Node] = field(default_factory=list)
    entries: dict[str, Entry] = field(default_factory=dict)
    key: tuple[str, Span] | None = None
    size: int = 1  # nodes in it, itself included
    height: int = 1  # levels of lists and mappings, its own included


class _Mark(Protocol):
    """A place in the text, counted from 0: the library has a class of its own for C and another for Python."""

    @property
    def line(self) -> int: ...

    @property
    def column(self) -> int: ...


class _Anchored(NamedTuple):
    node: Node
    size: int
    height: int


Format = Literal["yaml", "json"]


def read_document(text: str, file: str, format: Format = "yaml") -> Document:
    """Reads a document.

    An error that ends the reading is one finding; of a duplicate key, the first is kept.

    Args:
        text: the text without a byte order mark.
        file: the display name, for the findings.
        format: JSON is nearly YAML, but must be real JSON: others read it too.
    """
    findings: list[Diagnostic] = []
    try:
        return Document(_Composer(text, file, findings).compose(format), tuple(findings))
    except Unreadable as stop:
        return Document(None, (*findings, stop.diagnostic))


class _Composer:
    def __init__(self, text: str, file: str, findings: list[Diagnostic]):
        self.text, self.file, self.findings = text, file, findings
        self.lines = split_lines(text)
        self.stack: list[_Open] = []
        self.anchors: dict[str, _Anchored | None] = {}  # None: still being read
        self.nodes = 0
        self.root: Node | None = None

    def compose(self, format: Format) -> Node:
        events = json_events(self.text, self.file) if format == "json" else self._yaml_events()
        steps: dict[type[yaml.Event], Callable[[Any], None]] = {
            yaml.DocumentStartEvent: self._document,
            yaml.AliasEvent: self._alias,
            yaml.ScalarEvent: self._scalar,
            yaml.MappingStartEvent: self._open,
            yaml.SequenceStartEvent: self._open,
            yaml.MappingEndEvent: self._close,
            yaml.SequenceEndEvent: self._close,
        }
        for event in events:
            step = steps.get(type(event))
            if step is not None:
                step(event)
        if self.root is None:
            first = '{"version": "1"' if format == "json" else 'version: "1"'
            refuse(self.file, "the file is empty", Span(1, 1, 1, 1), help=f"begin with `{first}`")
        return self.root

    def _document(self, event: yaml.DocumentStartEvent) -> None:
        if self.root is not None:
            refuse(self.file, "the file has several documents", self._span(event), help="keep one")
        if event.version not in (None, (1, 2)):
            version = ".".join(map(str, event.version))
            refuse(
                self.file,
                f"the file declares YAML {version}, plans are YAML 1.2",
                self._span(event),
                help="remove the `%YAML` line",
            )

    def _check_characters(self) -> None:
        match = _NOT_TEXT.search(self.text)
        if match:
            before = split_lines(self.text[: match.start()])
            line, column = len(before), len(before[-1]) + 1
            refuse(
                self.file,
                f"the character U+{ord(match[0]):04X} is not allowed in a plan",
                Span(line, column, line, column + 1),
                help="remove it, or write it as an escape in double quotes",
            )

    def _yaml_events(self) -> Iterator[yaml.Event]:
        self._check_characters()
        try:
            yield from yaml.parse(self.text, Loader=yaml.CSafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            assert mark is not None and error.problem is not None  # the library gives the problem and its place
            line, column = self._position(mark)
            place = Span(line, column, line, column + 1)
            context = f", {error.context}" if error.context else ""
            message = f"not valid YAML{context}: {error.problem}"
            refuse(self.file, message, place, help=_HELP.get(error.problem))

    def _position(self, mark: _Mark) -> tuple[int, int]:
        """Line and column, from 1. A mark at the end of the text may be on a line that does not exist."""
        if mark.line < len(self.lines):
            return mark.line + 1, mark.column + 1
        return len(self.lines), len(self.lines[-1]) + 1

    def _span(self, event: yaml.Event) -> Span:
        assert event.start_mark is not None and event.end_mark is not None  # it was read from a text
        line, column = self._position(event.start_mark)
        end_line, end_column = self._position(event.end_mark)
        if end_column == 1 and end_line > line:  # a block scalar ends at the next line's start
            end_line, end_column = end_line - 1, len(self.lines[end_line - 2]) + 1
        return Span(line, column, end_line, end_column)

    def _open(self, event: yaml.CollectionStartEvent) -> None:
        span = self._span(event)
        mapping = isinstance(event, yaml.MappingStartEvent)
        if self._wants_key():
            refuse(self.file, "a key must be text", span, help=_QUOTE)
        if len(self.stack) == MAX_DEPTH:
            refuse_depth(self.file, span)
        kind = "map" if mapping else "seq"
        if event.tag not in (None, "!", f"tag:yaml.org,2002:{kind}"):
            self._refuse_tag(event.tag, span)
        self._count(span)
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        self.stack.append(_Open(span, mapping, bool(event.flow_style), event.anchor))

    def _close(self, event: yaml.CollectionEndEvent) -> None:
        done = self.stack.pop()
        start = done.start
        end: Span | None = self._span(event)
        if not done.flow:
            inner = [entry.value for entry in done.entries.values()] or done.items
            end = inner[-1].span if inner else start
        assert end is not None  # it was read from a text
        span = Span(start.line, start.column, end.end_line, end.end_column)
        node: Node = ListNode(tuple(done.items), span)
        if done.mapping:
            node = MapNode(tuple(done.entries.values()), span)
        self._add(_Anchored(node, done.size, done.height), done.anchor)

    def _scalar(self, event: yaml.ScalarEvent) -> None:
        span = self._span(event)
        plain = event.implicit[0]
        self._count(span)
        if self._wants_key():
            if event.tag not in (None, *TEXT_TAGS):
                self._refuse_tag(event.tag, span)
            if event.anchor is not None:
                self.anchors[event.anchor] = _Anchored(Scalar(event.value, event.value, span), 1, 0)
            self._key(event.value, span, plain=plain)
            return
        value = resolve(event.value) if plain or event.tag in TAGS else event.value
        if event.tag not in (None, *TEXT_TAGS) and not TAGS.get(event.tag, lambda _: False)(value):
            self._refuse_tag(event.tag, span)
        self._add(_Anchored(Scalar(value, event.value, span), 1, 0), event.anchor)

    def _alias(self, event: yaml.AliasEvent) -> None:
        span = self._span(event)
        name = quoted(f"*{event.anchor}")
        if event.anchor not in self.anchors:
            refuse(self.file, f"the alias {name} refers to nothing", span, help=_QUOTE)
        target = self.anchors[event.anchor]
        if target is None:
            message = f"the alias {name} is part of the value that it refers to"
            refuse(self.file, message, span, help="write the values out")
        self._count(span, target.size, alias=True)
        if len(self.stack) + target.height > MAX_DEPTH:
            refuse_depth(self.file, span)
        if self._wants_key():
            if not isinstance(target.node, Scalar):
                refuse(self.file, "a key must be text", span)
            self._key(target.node.text, span, plain=False)
        else:
            self._add(target._replace(node=replace(target.node, span=span)), None)

    def _wants_key(self) -> bool:
        return bool(self.stack) and self.stack[-1].mapping and self.stack[-1].key is None

    def _key(self, key: str, span: Span, *, plain: bool) -> None:
        if plain and key == "<<":
            refuse(
                self.file,
                "`<<` merges mappings in YAML 1.1 only; plans are YAML 1.2",
                span,
                help="write the entries out, or put them in a plan of their own and extend it",
            )
        self.stack[-1].key = (key, span)

    def _add(self, done: _Anchored, anchor: str | None) -> None:
        """Puts a finished node in its place."""
        if anchor is not None:
            self.anchors[anchor] = done
        if not self.stack:
            self.root = done.node
            return
        parent = self.stack[-1]
        parent.size += done.size
        parent.height = max(parent.height, done.height + 1)
        if not parent.mapping:
            parent.items.append(done.node)
            return
        assert parent.key is not None
        key, span = parent.key
        parent.key = None
        parent.size += 1
        if key in parent.entries:
            note_duplicate(self.findings, self.file, parent.entries[key], span)
        else:
            parent.entries[key] = Entry(key, done.node, span)

    def _count(self, span: Span, size: int = 1, *, alias: bool = False) -> None:
        self.nodes += size
        if self.nodes > MAX_NODES:
            refuse_nodes(self.file, span, alias=alias)

    def _refuse_tag(self, tag: str, span: Span) -> None:
        shown = quoted(tag.replace("tag:yaml.org,2002:", "!!"))
        refuse(self.file, f"the tag {shown} has no meaning in a plan", span, help="remove it")
