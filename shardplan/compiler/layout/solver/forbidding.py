"""Why code cannot be split: the line that forbids it, and how to change it."""

from __future__ import annotations

from dataclasses import dataclass

from shardplan.compiler.layout.code_advice import advice
from shardplan.compiler.layout.layout_diagnostics import diagnostic, with_line

from .draft import Draft, DraftTrials


@dataclass(frozen=True, slots=True)
class Forbidden:
    """The reason that forbids a split.

    Args:
        reason: in words, with the line.
        change: what to write instead; None where this is unknown.
    """

    reason: str
    change: str | None = None


def forbidden(trials: DraftTrials, draft: Draft) -> Forbidden:
    """The first error of a wrong draft, with the line of code and how to change it."""
    hard, resolved = trials.hard(draft), trials.bound(draft)
    if not hard or resolved is None:
        return Forbidden(trials.reason(draft))
    said = diagnostic(resolved, hard[:1], None, None)
    return Forbidden(with_line(said), advice(resolved, hard[0]))
