"""The entries of other projects' plans, in one form for all projects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from shardplan.core.diagnostics import Code, Diagnostic, Label, Location, Severity

NO_FORM = Code("SP540")
NO_STYLE = Code("SP541")
NO_LAYOUTS = Code("SP542")
NO_GLOB = Code("SP543")
NEEDS_MODEL = Code("SP544")
LEFT_OUT = Code("SP545")
IMPLIED = Code("SP546")
NO_IMPORT = Code("SP547")
TWO = Code("SP548")

# How a value is laid out over the tensor-parallel ranks, with the layouts of other projects:
#   whole     Replicate()               features  Shard(-1), a slice of the last dim
#   sequence  Shard(0) or Shard(1)      partial   Partial()
Spread = Literal["whole", "features", "sequence", "partial"]
Kind = Literal["colwise", "rowwise", "sequence", "input", "output", "style", "experts", "stack", "nothing"]


@dataclass(frozen=True, slots=True)
class Meaning:
    """The effect of another project's style on a module.

    Args:
        kind: the style splits by output or by input features; runs on slices of the sequence; moves an input or an output; is
            already a style of shardplan's; distributes a module of experts, or a stack of it; or has no effect here.
        label: the source's word for it, for messages.
        source, destination: the input layout and the output layout.
        dtensor: whether the output is a DTensor, which keeps its layout.
        seq_dim: the tensor dim that `sequence` splits.
        argument: the name of the argument that is moved.
        position: its position among the positional arguments, where it has no name.
        output: for `kind` input: (source, destination) of the output, which is moved as well.
        options: for `kind` style and experts: `style` and its options; for colwise and rowwise: options of the rule.
        why: for `kind` nothing: the reason.
        unsure: whether the style is usual for embeddings and for linear layers, so that only the model can tell.
    """

    kind: Kind
    label: str
    source: Spread | None = None
    destination: Spread | None = None
    dtensor: bool = False
    seq_dim: int = 1
    argument: str | None = None
    position: int = 0
    output: tuple[Spread | None, Spread | None] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    unsure: bool = False

    @property
    def uses_sequence(self) -> bool:
        return "sequence" in (self.source, self.destination, *(self.output or ()))


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry.

    Args:
        pattern: a glob of shardplan's over modules or parameters.
        meaning: what the style does there.
        at: its place in the source.
        kinds: the kinds of the modules that it matches; None without a model.
    """

    pattern: str
    meaning: Meaning
    at: Location
    kinds: frozenset[str] | None = None

    @property
    def layer(self) -> str | None:
        """The layer of the pattern: the pattern up to its first list index; None where it has no index."""
        parts = self.pattern.split(".")
        indices = [i for i, part in enumerate(parts) if part == "*" or part.isdecimal()]
        return ".".join(parts[: indices[0] + 1]) if indices else None


class NotConvertible(Exception):
    """An entry without a counterpart in shardplan's plans.

    Args:
        code: the code of its finding.
        message, help: those of the finding.
    """

    def __init__(self, code: Code, message: str, help: str | None = None):
        super().__init__(message)
        self.code, self.message, self.help = code, message, help

    def finding(self, at: Location) -> Diagnostic:
        return finding(self.code, self.message, at, help=self.help)


def finding(
    code: Code, message: str, at: Location | None, *, help: str | None = None, warning: bool = False
) -> Diagnostic:
    severity = Severity.WARNING if warning else Severity.ERROR
    return Diagnostic(code, severity, message, Label(at) if at is not None else None, help=help)


def quoted(text: str) -> str:
    """The user's text for a message: on one line, and not too long."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:60])
    return f"`{shown}...`" if len(text) > 60 else f"`{shown}`"
