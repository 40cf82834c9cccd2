"""A plan given as a dict -> nodes, without places. A dict may hold what YAML and JSON can express."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from shardplan.core.diagnostics import Diagnostic, Label, Location, Severity

from .form import WRONG_VALUE
from .limits import MAX_DEPTH, MAX_NODES
from .nodes import Document, Entry, ListNode, MapNode, Node, Path, Scalar
from .parse_findings import quoted
from .scalars import MAX_DIGITS, number
from .syntax import Unreadable, refuse_depth, refuse_nodes


def read_python(data: Mapping[str, object], file: str) -> Document:
    """Reads a plan from Python.

    Args:
        data: mappings with text as keys, lists, tuples, text, numbers, bools and None.
        file: the display name, for the findings.
    """
    try:
        return Document(_Reader(file).read(data, (), 0))
    except Unreadable as stop:
        return Document(None, (stop.diagnostic,))


class _Reader:
    def __init__(self, file: str):
        self.file = file
        self.nodes = 0

    def read(self, value: object, path: Path, depth: int) -> Node:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            refuse_nodes(self.file, None)
        match value:
            case None | bool():
                return Scalar(value, str(value))
            case str():
                text = str.__str__(value)  # a StrEnum is its text
                if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
                    self._refuse(path, f"the text {quoted(text)} holds half of a surrogate pair")
                return Scalar(text, text)
            case int():
                exact = int(value) if abs(value) < 10**MAX_DIGITS else float("inf")
                return Scalar(exact, str(exact))
            case float():
                return Scalar(number(float(value)), str(value))
            case list() | tuple() | Mapping() if depth == MAX_DEPTH:
                refuse_depth(self.file, None)
            case list() | tuple():
                return ListNode(tuple(self.read(item, (*path, i), depth + 1) for i, item in enumerate(value)))
            case Mapping():
                return MapNode(tuple(self._entry(key, item, path, depth + 1) for key, item in value.items()))
            case _:
                kinds = "text, numbers, lists and mappings"
                self._refuse(path, f"a plan holds {kinds}, not an object of class {type(value).__name__}")

    def _entry(self, key: object, value: object, path: Path, depth: int) -> Entry:
        self.nodes += 1
        if not isinstance(key, str):
            self._refuse(path, f"a key must be text, not an object of class {type(key).__name__}")
        text = str.__str__(key)
        if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
            self._refuse(path, f"the key {quoted(text)} holds half of a surrogate pair")
        return Entry(text, self.read(value, (*path, text), depth))

    def _refuse(self, path: Path, message: str) -> NoReturn:
        primary = Label(Location(self.file, path, "value"))
        raise Unreadable(Diagnostic(WRONG_VALUE, Severity.ERROR, message, primary))
