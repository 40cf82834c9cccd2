"""Raising findings as an exception."""

from __future__ import annotations

from collections.abc import Iterable

from shardplan.core.diagnostics import Diagnostic, PlanError
from shardplan.core.report import as_errors, ordered
from shardplan.core.sources import SourceMap

from .text import text


def sources_of(error: PlanError) -> SourceMap:
    """The texts into which an error's findings point, where they are known."""
    return error.sources if isinstance(error.sources, SourceMap) else SourceMap()


def raise_errors(findings: Iterable[Diagnostic], sources: SourceMap, *, strict: bool = False) -> None:
    """Raise PlanError with all findings, if one of them is an error.

    Args:
        strict: treat warnings as errors.
    """
    found = ordered(as_errors(findings) if strict else findings, sources)
    if any(d.is_error for d in found):
        error = PlanError(found, text(found, sources, color=False))
        error.sources = sources
        raise error
