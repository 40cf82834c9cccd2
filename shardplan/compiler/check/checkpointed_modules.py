"""Activation checkpointing wraps each activation once, outside of what is compiled, and wraps something."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.diagnostics import Code, Diagnostic, Severity
from shardplan.core.tree import ancestors

from .check_words import field_label
from .facts import Facts

NESTED = Code("SP380")
COMPILED = Code("SP381")
TOO_FEW = Code("SP382")


def check(facts: Facts) -> Iterator[Diagnostic]:
    """At most one finding for each reason."""
    section, wrapped = facts.resolved.activation_checkpointing, frozenset(facts.resolved.ac_modules)
    if section is None:
        return
    yield from _compiled(facts)
    if section.every > 1 and not wrapped and (section.modules or facts.resolved.dp_units):
        yield Diagnostic(
            code=TOO_FEW,
            severity=Severity.WARNING,
            message=f"every is {section.every}, but no pattern matches that many modules: none is checkpointed",
            primary=field_label(section, "every"),
            help="use a smaller number",
        )
    inner = tuple(name for name in facts.resolved.ac_modules if any(a in wrapped for a in ancestors(name)))
    if not inner:
        return
    outer = {next(a for a in ancestors(name) if a in wrapped) for name in inner}
    yield Diagnostic(
        code=NESTED,
        severity=Severity.ERROR,
        message=f"{facts.resolved.tree.named(inner)} is checkpointed, and so is {facts.resolved.tree.named(sorted(outer))} around it",
        primary=field_label(section, "modules"),
        help="name one of the two in `modules`",
        modules=inner,
    )


def _compiled(facts: Facts) -> Iterator[Diagnostic]:
    resolved, compiled = facts.resolved, frozenset(facts.resolved.compile_modules)
    inside = tuple(name for name in resolved.ac_modules if any(a in compiled for a in ancestors(name)))
    if inside:
        outer = {next(a for a in ancestors(name) if a in compiled) for name in inside}
        yield Diagnostic(
            code=COMPILED,
            severity=Severity.ERROR,
            message=f"{facts.resolved.tree.named(inside)} is checkpointed inside {facts.resolved.tree.named(sorted(outer))}, which is compiled",
            primary=field_label(resolved.activation_checkpointing, "modules"),
            help="checkpoint the compiled modules, or compile the checkpointed ones",
            modules=inside,
        )
