"""The entries of another project's plan, in one form for all projects."""

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

# How a value is spread over the tensor-parallel ranks, as the layouts of other projects say it:
#   whole     Replicate()               features  Shard(-1), a slice of the last dim
#   sequence  Shard(0) or Shard(1)      partial   Partial()
Spread = Literal["whole", "features", "sequence", "partial"]
Kind = Literal["colwise", "rowwise", "sequence", "input", "output", "style", "experts", "stack", "nothing"]


@dataclass(frozen=True, slots=True)
class Meaning:
    """The effect of another project's style on a module.

    Args:
        kind: it splits by output or by input features, runs on slices of the sequence, moves an input or an output; is a
            style of ours already; distributes a module of experts, or a stack of one; or has no effect here.
        label: as the source has it, for messages.
        source, destination: the input layout and the output layout.
        dtensor: whether the output is a DTensor, which carries its layout along.
        seq_dim: the dim of `sequence`.
        argument: the argument that is moved, by name.
        position: its place among the positional arguments, where it has no name.
        output: for `kind` input: (source, destination) of the output that is moved as well.
        options: for `kind` style, experts, colwise and rowwise: `style` and options, options of the rule.
        why: for `kind` nothing: why not.
        unsure: whether embedding and linear layers are both usual in this place, so that only the model tells.
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
        pattern: a glob over modules or parameters, in our language.
        meaning: what is done there.
        at: its place in the source.
        kinds: the kinds of the modules that it matches; None without a model.
    """

    pattern: str
    meaning: Meaning
    at: Location
    kinds: frozenset[str] | None = None

    @property
    def layer(self) -> str | None:
        """The pattern up to the first list index: the layer that it is in; None where it is in none."""
        parts = self.pattern.split(".")
        indices = [i for i, part in enumerate(parts) if part == "*" or part.isdecimal()]
        return ".".join(parts[: indices[0] + 1]) if indices else None


class NotConvertible(Exception):
    """An entry without a counterpart in a plan of ours.

    Args:
        code: its finding.
        message, help: the finding's.
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
    """Text of the user in a message: on one line, not too long."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:60])
    return f"`{shown}...`" if len(text) > 60 else f"`{shown}`"
