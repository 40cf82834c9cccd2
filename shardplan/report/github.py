"""Findings as annotations of a GitHub workflow: one line for each, as a workflow command.

https://docs.github.com/en/actions/reference/workflow-commands-for-github-actions
"""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.diagnostics import Diagnostic
from shardplan.core.report import Report
from shardplan.core.sources import SourceMap


def github_lines(report: Report) -> Iterator[str]:
    """One line for each finding. Findings in a plan without a file have no place."""
    for diagnostic in report.diagnostics:
        yield _annotation(diagnostic, report.sources)


def _annotation(diagnostic: Diagnostic, sources: SourceMap) -> str:
    fields: dict[str, str] = {"title": diagnostic.code}
    location = diagnostic.primary.location if diagnostic.primary is not None else None
    if location is not None and (span := sources.span(location)) is not None:
        place = {"line": span.line, "endLine": span.end_line, "col": span.column, "endColumn": span.end_column}
        fields |= {"file": location.file, **{name: str(number) for name, number in place.items()}}
    lines = [diagnostic.message, *diagnostic.notes, *([f"help: {diagnostic.help}"] if diagnostic.help else [])]
    properties = ",".join(f"{name}={_property(value)}" for name, value in fields.items())
    return f"::{diagnostic.severity} {properties}::{_data(chr(10).join(lines))}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
