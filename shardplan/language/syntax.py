"""Shared by the readers of texts and of Python: their findings, and checks that both make."""

from __future__ import annotations

from typing import NoReturn

from shardplan.core.diagnostics import Code, Diagnostic, Label, Location, Severity, Span

from .limits import MAX_DEPTH, MAX_FINDINGS, MAX_NODES
from .nodes import Entry
from .parse_findings import TOO_LARGE, quoted

SYNTAX = Code("SP102")
DUPLICATE_KEY = Code("SP103")


class Unreadable(Exception):
    """A text that cannot be read further."""

    def __init__(self, diagnostic: Diagnostic):
        super().__init__(diagnostic.message)
        self.diagnostic = diagnostic


def refuse(file: str, message: str, span: Span | None, *, help: str | None = None, code: Code = SYNTAX) -> NoReturn:
    """Ends the reading of a text with one finding."""
    primary = Label(Location(file, span=span))
    raise Unreadable(Diagnostic(code, Severity.ERROR, message, primary, help=help))


def refuse_depth(file: str, span: Span | None) -> NoReturn:
    refuse(file, f"lists and mappings are nested more than {MAX_DEPTH} deep", span, code=TOO_LARGE)


def refuse_nodes(file: str, span: Span | None, *, alias: bool = False) -> NoReturn:
    repeated = ", with what its aliases repeat" if alias else ""
    refuse(file, f"the plan has more than {MAX_NODES} keys and values{repeated}", span, code=TOO_LARGE)


def note_duplicate(findings: list[Diagnostic], file: str, first: Entry, second: Span | None) -> None:
    """Adds the finding about a duplicate key in a mapping."""
    if len(findings) == MAX_FINDINGS:
        refuse(file, f"there are more than {MAX_FINDINGS} findings", second, code=TOO_LARGE)
    findings.append(
        Diagnostic(
            DUPLICATE_KEY,
            Severity.ERROR,
            f"the key {quoted(first.key)} appears twice in one mapping",
            Label(Location(file, span=second), "again here"),
            (Label(Location(file, span=first.span), "first here"),),
            help="keep one of the two",
        )
    )
