"""Reports as SARIF 2.1.0 (OASIS standard), for code-scanning services and editors."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from shardplan.core.diagnostics import Diagnostic, Label
from shardplan.core.report import Report
from shardplan.core.sources import SourceMap
from shardplan.core.version import __version__

from .pages import Page, pages

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def to_sarif(report: Report, *, root: Path | None = None) -> dict[str, Any]:
    """The report as one SARIF run.

    Args:
        report: the findings.
        root: the folder to which file names are relative; None is the current folder.
    """
    root = root or Path.cwd()
    used = sorted({d.code for d in report.diagnostics})
    index = {code: i for i, code in enumerate(used)}
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "shardplan",
                        "semanticVersion": __version__,
                        "rules": [_rule(pages()[code]) for code in used],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "results": [_result(d, index[d.code], report.sources, root) for d in report.diagnostics],
            }
        ],
    }


def _rule(page: Page) -> dict[str, Any]:
    return {
        "id": page.code,
        "shortDescription": {"text": page.title},
        "fullDescription": {"text": " ".join(page.text.split())},
        "help": {"text": page.body, "markdown": page.body},
    }


def _result(diagnostic: Diagnostic, rule_index: int, sources: SourceMap, root: Path) -> dict[str, Any]:
    parts = [diagnostic.message, *diagnostic.notes]
    if diagnostic.help:
        parts.append(f"help: {diagnostic.help}")
    result: dict[str, Any] = {
        "ruleId": diagnostic.code,
        "ruleIndex": rule_index,
        "level": diagnostic.severity.value,
        "message": {"text": "\n".join(parts)},
    }
    physical = _physical(diagnostic.primary, sources, root) if diagnostic.primary else None
    logical = [{"fullyQualifiedName": name, "kind": "module"} for name in diagnostic.modules]
    location = {
        **({"physicalLocation": physical} if physical else {}),
        **({"logicalLocations": logical} if logical else {}),
    }
    if location:
        result["locations"] = [location]
    related = [_related(i, label, sources, root) for i, label in enumerate(diagnostic.related)]
    if related:
        result["relatedLocations"] = related
    return result


def _related(number: int, label: Label, sources: SourceMap, root: Path) -> dict[str, Any]:
    physical = _physical(label, sources, root)
    return {
        "id": number,
        **({"physicalLocation": physical} if physical else {}),
        "message": {"text": label.text or label.location.file},
    }


def _physical(label: Label, sources: SourceMap, root: Path) -> dict[str, Any] | None:
    """The file and region of a label; None where it is not in a file (`<dict>`)."""
    name = label.location.file
    if name.startswith("<"):
        return None
    location: dict[str, Any] = {"artifactLocation": {"uri": _uri(name, root)}}
    span = sources.span(label.location)
    if span is not None:
        location["region"] = {
            "startLine": span.line,
            "startColumn": span.column,
            "endLine": span.end_line,
            "endColumn": span.end_column,
        }
    return location


def _uri(name: str, root: Path) -> str:
    """The file's URI: relative where the file is under the root, else absolute."""
    path = Path(name)
    if path.is_absolute():
        if not path.is_relative_to(root):
            return path.as_uri()
        path = path.relative_to(root)
    return quote(str(PurePosixPath(path)))
