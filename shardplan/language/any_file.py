"""A file other than our plans, with the place of each element."""

from __future__ import annotations

from pathlib import Path

from shardplan.core.diagnostics import Diagnostic, Label, Location, Severity
from shardplan.core.sources import SourceFile, SourceMap
from shardplan.core.user_files import CannotRead

from .nodes import spans, split_lines, to_data
from .parse_findings import TOO_LARGE, quoted
from .plan_files import CANNOT_READ, read_text
from .reader import read_document


def read_data(name: str) -> tuple[object, SourceMap, tuple[Diagnostic, ...]]:
    """Read a YAML or JSON file as safely as a plan.

    Returns:
        Lists, dicts and plain values, None if it could not be read; the text, by which a `Location` with a path into
        the data becomes a line and a column; and why it could not be read (SP101 to SP103, SP111).
    """
    try:
        text = read_text(Path(name))
    except CannotRead as error:
        code = TOO_LARGE if error.too_large else CANNOT_READ
        found = Diagnostic(code, Severity.ERROR, f"{quoted(name, 300)} {error.reason}", Label(Location(name)))
        return None, SourceMap({name: SourceFile(name)}), (found,)
    document = read_document(text, name, "json" if name.lower().endswith(".json") else "yaml")
    root = document.root
    sources = SourceMap({name: SourceFile(name, split_lines(text), {} if root is None else spans(root))})
    return None if root is None else to_data(root), sources, document.findings
