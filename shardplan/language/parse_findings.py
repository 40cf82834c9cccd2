"""Collects the errors of one document."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from shardplan.core.diagnostics import Code, Diagnostic, Label, Location, Part, Rewrite, Severity, Span

from .limits import MAX_FINDINGS
from .nodes import ListNode, MapNode, Node, Path, Scalar

TOO_LARGE = Code("SP111")


class Findings:
    """The findings about one document, in the order in which they are made.

    Args:
        file: the document's display name.
        found: the findings of its reader.
    """

    def __init__(self, file: str, found: Iterable[Diagnostic] = ()):
        self.file = file
        self._found = list(found)[:MAX_FINDINGS]

    def add(
        self,
        code: Code,
        message: str,
        path: Path = (),
        part: Part = "value",
        *,
        span: Span | None = None,
        label: str = "",
        related: Iterable[Label] = (),
        notes: tuple[str, ...] = (),
        help: str | None = None,
        severity: Severity = Severity.ERROR,
        words: Iterable[str | None] = (),
    ) -> None:
        """Notes a finding at a path of the document, or at a span where the path is not exact enough.

        Args:
            words: what the help line proposes to write there; None: remove it.
        """
        if len(self._found) == MAX_FINDINGS:
            code, message, related, notes = TOO_LARGE, f"there are more than {MAX_FINDINGS} findings", (), ()
            help, label, severity, words = "fix the first ones; that may fix others", "", Severity.ERROR, ()
        elif self.full:
            return
        place = Location(self.file, path, part, span)
        proposals = tuple(Rewrite(place, word) for word in words)
        self._found.append(
            Diagnostic(code, severity, message, Label(place, label), tuple(related), notes, help, proposals=proposals)
        )

    @property
    def full(self) -> bool:
        """Whether no more findings are noted."""
        return len(self._found) > MAX_FINDINGS

    @property
    def all(self) -> tuple[Diagnostic, ...]:
        return tuple(self._found)


def first_of(found: Iterable[Diagnostic], about: str) -> tuple[Diagnostic, ...]:
    """The first findings, and an error that says that there are more. A plan of a megabyte can have 20,000 wrong rules, each for all
    layers."""
    findings = tuple(islice(found, MAX_FINDINGS + 1))
    if len(findings) <= MAX_FINDINGS:
        return findings
    more = Diagnostic(
        code=TOO_LARGE,
        severity=Severity.ERROR,
        message=f"there are more than {MAX_FINDINGS} findings about the {about}",
        primary=findings[MAX_FINDINGS].primary,
        help="fix the first ones; that may fix others",
    )
    return (*findings[:MAX_FINDINGS], more)


LONGEST_PATH = 300  # characters of a path in a message


def quoted(text: str, most: int = 60) -> str:
    """The user's text in a message: on one line, without control characters, of limited length."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: most + 1])
    return f"`{shown[:most]}...`" if len(text) > most else f"`{shown}`"


def describe(node: Node | None) -> str:
    """A value's description, in words."""
    match node:
        case None | Scalar(None):
            return "nothing"
        case Scalar(bool(value)):
            return "true" if value else "false"
        case Scalar(str(value)):
            return f"the text {quoted(value)}" if value else "an empty text"
        case Scalar(_, text):
            return f"the number {quoted(text)[1:-1]}"
        case ListNode():
            return "a list"
        case MapNode():
            return "a mapping"
