"""What the readers of texts and of Python share: their findings, and the checks that both make."""

from __future__ import annotations

from typing import NoReturn

from shardplan.core.diagnostics import Code, Diagnostic, Label, Location, Severity, Span

from .limits import MAX_DEPTH, MAX_FINDINGS, MAX_NODES
from .nodes import Entry
from .parse_findings import TOO_LARGE, quoted

SYNTAX = Code(
    code="SP102",
    title="the text is not valid YAML or JSON",
    text="""
    A plan is one YAML 1.2 or JSON document. What most often goes wrong in YAML: a pattern that begins with
    `*`, `{`, `[`, `?`, `!` or `&` means something else to YAML and needs quotes; indentation is made of
    spaces; text that holds `: ` or ` #` needs quotes. A file that ends in .json must be JSON: no comments, no
    comma after the last entry.

    Tags (`!!python/...`) name code or types in other tools; nothing in a plan does. `<<` merged mappings in
    YAML 1.1 and is a plain key in YAML 1.2; a plan that shares rules with another extends it.
    """,
    bad="""
    tensor_parallel:
      *.q_proj: colwise
    """,
    good="""
    tensor_parallel:
      "*.q_proj": colwise
    """,
)
DUPLICATE_KEY = Code(
    code="SP103",
    title="a duplicate key",
    text="""
    A mapping has each key once. Most YAML and JSON readers keep the last of two equal keys and silently drop the
    other; here that would be a rule without effect.
    """,
    bad="""
    tensor_parallel:
      lm_head: colwise_gather_output
      lm_head: colwise_vocab
    """,
    good="""
    tensor_parallel:
      lm_head: colwise_vocab
    """,
)


class Unreadable(Exception):
    """A text in which nothing further can be read."""

    def __init__(self, diagnostic: Diagnostic):
        super().__init__(diagnostic.message)
        self.diagnostic = diagnostic


def refuse(file: str, message: str, span: Span | None, *, help: str | None = None, code: Code = SYNTAX) -> NoReturn:
    """Ends the reading of a text with one finding."""
    primary = Label(Location(file, span=span))
    raise Unreadable(Diagnostic(code.code, Severity.ERROR, message, primary, help=help))


def refuse_depth(file: str, span: Span | None) -> NoReturn:
    refuse(file, f"lists and mappings are nested more than {MAX_DEPTH} deep", span, code=TOO_LARGE)


def refuse_nodes(file: str, span: Span | None, *, alias: bool = False) -> NoReturn:
    repeated = ", with what its aliases repeat" if alias else ""
    refuse(file, f"the plan has more than {MAX_NODES} keys and values{repeated}", span, code=TOO_LARGE)


def note_duplicate(findings: list[Diagnostic], file: str, first: Entry, second: Span | None) -> None:
    """Adds the finding about a key that a mapping has already."""
    if len(findings) == MAX_FINDINGS:
        refuse(file, f"there are more than {MAX_FINDINGS} findings", second, code=TOO_LARGE)
    findings.append(
        Diagnostic(
            DUPLICATE_KEY.code,
            Severity.ERROR,
            f"the key {quoted(first.key)} appears twice in one mapping",
            Label(Location(file, span=second), "again here"),
            (Label(Location(file, span=first.span), "first here"),),
            help="keep one of the two",
        )
    )
