"""The place of each element of a plan document in its text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .diagnostics import Location, Part, Span

SpanKey = tuple[tuple[str | int, ...], Part]  # (path into the document, which part of the element)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One document: its text, split into lines, and the span of each element. A plan from Python has no text."""

    name: str
    lines: tuple[str, ...] = ()
    spans: Mapping[SpanKey, Span] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SourceMap:
    """The documents that a plan was read from (itself and what it extends), by display name."""

    files: Mapping[str, SourceFile] = field(default_factory=dict)

    def span(self, location: Location) -> Span | None:
        """The span of a location, or of its nearest enclosing element; None if the document has no text."""
        if location.span is not None:
            return location.span
        source = self.files.get(location.file)
        if source is None:
            return None
        exact = source.spans.get((location.path, location.part))
        if exact is not None:
            return exact
        for end in range(len(location.path), 0, -1):
            span = source.spans.get((location.path[:end], "key"))
            if span is not None:
                return span
        return None

    def placed(self, location: Location) -> Location:
        """The location with its span, which no longer needs this map."""
        return replace(location, span=self.span(location))
