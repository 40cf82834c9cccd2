"""A file that is no plan of ours, with the place of each element."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardplan.core.diagnostics import Diagnostic, Label, Location, Severity
from shardplan.core.sources import SourceFile, SourceMap
from shardplan.core.user_files import CannotRead

from .nodes import spans, split_lines, to_data
from .parse_findings import TOO_LARGE, quoted
from .plan_files import CANNOT_READ, read_text
from .reader import read_document


@dataclass(frozen=True, slots=True)
class ReadData:
    """The content of a file.

    Args:
        data: lists, dicts and plain values; None where it could not be read.
        sources: the text, for the places of findings: a `Location` of a path into the data becomes a line and a column.
        diagnostics: why it could not be read.
    """

    data: object
    sources: SourceMap
    diagnostics: tuple[Diagnostic, ...] = ()


def read_data(name: str) -> ReadData:
    """Read a YAML or JSON file as safely as a plan. What is wrong with it is a finding (SP101 to SP103, SP111)."""
    try:
        text = read_text(Path(name))
    except CannotRead as error:
        code = TOO_LARGE if error.too_large else CANNOT_READ
        found = Diagnostic(code, Severity.ERROR, f"{quoted(name, 300)} {error.reason}", Label(Location(name)))
        return ReadData(None, SourceMap({name: SourceFile(name)}), (found,))
    document = read_document(text, name, "json" if name.lower().endswith(".json") else "yaml")
    root = document.root
    sources = SourceMap({name: SourceFile(name, split_lines(text), {} if root is None else spans(root))})
    return ReadData(None if root is None else to_data(root), sources, document.findings)
