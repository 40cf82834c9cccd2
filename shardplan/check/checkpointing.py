"""Activation checkpointing wraps each activation once."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.diagnostics import Code, Diagnostic, Severity
from shardplan.core.tree import ancestors, named

from .facts import Facts
from .places import field_label

NESTED = Code(
    code="SP380",
    title="activation checkpointing of a module and of a module around it",
    text="""A checkpointed module is run again in backward. One inside another would be run a third time, and
saves nothing that the outer one does not save already.""",
    bad="""# shardplan validate llama-3.1-8b.json mine.yaml
version: "1"
name: mine
activation_checkpointing:
  modules: [model.layers.*, model.layers.*.mlp]
""",
    good="""# shardplan validate llama-3.1-8b.json mine.yaml
version: "1"
name: mine
activation_checkpointing:
  modules: [model.layers.*]
""",
)

CODES = (NESTED,)


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for the section."""
    section, wrapped = facts.resolved.activation_checkpointing, frozenset(facts.resolved.ac_modules)
    inner = tuple(name for name in facts.resolved.ac_modules if any(a in wrapped for a in ancestors(name)))
    if not inner or section is None:
        return
    outer = {next(a for a in ancestors(name) if a in wrapped) for name in inner}
    yield Diagnostic(
        code=NESTED.code,
        severity=Severity.ERROR,
        message=f"{named(inner)} is checkpointed, and so is {named(sorted(outer))} around it",
        primary=field_label(section, "modules"),
        help="name one of the two in `modules`",
        modules=inner,
    )
