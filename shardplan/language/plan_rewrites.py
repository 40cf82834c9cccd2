"""Replaces one key or value of a YAML plan, or removes an entry; all other characters stay as they are."""

from __future__ import annotations

import json

from shardplan.core.diagnostics import Rewrite, Span
from shardplan.core.sources import SourceFile

from .nodes import MapNode, Node, node_at
from .plan_edits import begins_line, last_line_of, quoted_key
from .reader import read_document

ITS_OWN = "\"'[{"  # a proposal that begins so sets its own form


def rewrite_plan(source: SourceFile, change: Rewrite) -> str | None:
    """The text of a plan with the change; None if the place is in another file, or does not have lines of its own."""
    location = change.location
    root = read_document("\n".join(source.lines), source.name).root
    if location.file != source.name or location.span is not None or not isinstance(root, MapNode):
        return None
    lines = list(source.lines)
    if change.word is None:
        return _without(lines, root, location.path)
    if not location.path:
        first = root.entries[0].span if root.entries else None
        if first is None:
            return None
        return "\n".join([*lines[: first.line - 1], change.word, *lines[first.line - 1 :]])
    span = _span(root, location.path, key=location.part == "key")
    if span is None or span.line != span.end_line:
        return None
    line = lines[span.line - 1]
    old = line[span.column - 1 : span.end_column - 1]
    lines[span.line - 1] = line[: span.column - 1] + _like(old, change.word) + line[span.end_column - 1 :]
    return "\n".join(lines)


def _span(root: Node, path: tuple[str | int, ...], *, key: bool) -> Span | None:
    above = node_at(root, path[:-1])
    if key and isinstance(above, MapNode):
        return next((entry.span for entry in above.entries if entry.key == path[-1]), None)
    node = node_at(root, path)
    return None if node is None else node.span


def _like(old: str, word: str) -> str:
    """A word in the quotes of the old one."""
    if word[:1] in ITS_OWN:
        return word
    if old[:1] == '"':
        return json.dumps(word, ensure_ascii=False)
    if old[:1] == "'":
        return "'" + word.replace("'", "''") + "'"
    return quoted_key(word)


def _without(lines: list[str], root: MapNode, path: tuple[str | int, ...]) -> str | None:
    """Without an entry; a section that would become empty goes with it."""
    above = node_at(root, path[:-1])
    if not path or not isinstance(above, MapNode):
        return None
    if len(above.entries) == 1 and len(path) > 1:
        return _without(lines, root, path[:-1])
    entry = next((entry for entry in above.entries if entry.key == path[-1]), None)
    if entry is None or entry.span is None or not begins_line(lines, entry.span):
        return None
    start, end = entry.span.line, last_line_of(entry.value, entry.span)
    if any(line.lstrip().startswith("#") for line in lines[start - 1 : end]):
        return None
    return "\n".join([*lines[: start - 1], *lines[end:]])
