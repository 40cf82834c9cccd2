"""Findings: the problem, its place, and what to change."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NewType

Part = Literal["key", "value"]  # of an element of a document

# The code of a kind of findings, `SPnnn`: a constant next to the rule that emits it. Its page is docs/diagnostics/SPnnn.md.
Code = NewType("Code", str)


class Severity(StrEnum):
    """The weight of a finding: an error refuses the plan, a warning does not (unless `--strict`)."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a text file; lines and columns count from 1, `end_column` is one past the last character."""

    line: int
    column: int
    end_line: int
    end_column: int


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a plan document.

    Stages carry the *path* into the document (`("tensor_parallel", "model.norm")`); only the renderer turns it
    into a line and a column, through the `SourceMap`. `span` is for places without a path: a syntax error.

    Args:
        file: the document's display name: a path as the user wrote it, `plans/llama.yaml`, `<dict>`, `<hf>`.
        path: keys and indices from the document's root.
        part: whether the key or the value of the last path element is meant.
        span: an exact place, if the document has no structure there.
    """

    file: str
    path: tuple[str | int, ...] = ()
    part: Part = "key"
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class Label:
    """A place with a short text that is printed under it."""

    location: Location
    text: str = ""


@dataclass(frozen=True, slots=True)
class Edit:
    """A tried change of one rule that fixes a finding, as a change of a plan's text.

    Args:
        section: the section that has the rule, or should have it.
        pattern, value: those of the rule that should apply. `none` removes an inherited rule; None means that no rule should apply.
        location: the place of the rule that applies now, if it is in the same section; else None.
        keep: patterns without alternatives for which that rule still applies.
        override: whether that rule applies to more than `pattern` and cannot be divided.
    """

    section: str
    pattern: str
    value: str | None
    location: Location | None = None
    keep: tuple[str, ...] = ()
    override: bool = False


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A change of one key or value of a plan, as a help line proposes it.

    Args:
        location: the place of a key or a value, by its path. The place of the document itself means a new line above all others.
        word: its replacement, as YAML has it; None: the entry is removed, key and value.
    """

    location: Location
    word: str | None


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding. The first line (`severity[code]: message`) is complete by itself.

    Args:
        code: the code of its kind, never reused; `shardplan explain CODE` prints its page.
        severity: error or warning.
        message: one sentence, without a final full stop, that says what is declared and what is needed.
        primary: the line of the plan to change, if there is one.
        related: other lines of the plan that are involved.
        notes: facts, one per line (`model.layers.0.self_attn: num_key_value_heads is 4`).
        help: what to change, as an instruction.
        modules: the modules or parameters concerned; equal findings over layers are one diagnostic.
        edits: the changes that fix it, if they were tried; empty if there are none.
        proposals: untried changes that the help line names; one may fix it, the likeliest first.
    """

    code: Code
    severity: Severity
    message: str
    primary: Label | None = None
    related: tuple[Label, ...] = ()
    notes: tuple[str, ...] = ()
    help: str | None = None
    modules: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = field(default=(), compare=False)
    proposals: tuple[Edit | Rewrite, ...] = field(default=(), compare=False)

    @property
    def is_error(self) -> bool:
        return self.severity is Severity.ERROR


class PlanError(ValueError):
    """A plan that cannot be used; `diagnostics` has every finding, `str()` renders them as text.

    Args:
        diagnostics: all findings, errors and warnings.
        text: the findings as the command line would print them.
    """

    sources: object = None  # the SourceMap that the findings point into, in the process that found them

    def __init__(self, diagnostics: tuple[Diagnostic, ...], text: str = ""):
        self.diagnostics = tuple(diagnostics)
        super().__init__(text or "\n".join(f"{d.severity}[{d.code}]: {d.message}" for d in self.diagnostics))

    def __reduce__(self) -> tuple[type, tuple]:
        return type(self), (self.diagnostics, str(self))

    def _render_traceback_(self) -> list[str]:
        """The text in a notebook: the findings. The frames of the call say nothing about a plan."""
        return [type(self).__name__, "", *str(self).splitlines()]
