"""Activation checkpointing wraps each activation once, from outside of what is compiled, and wraps something."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.diagnostics import Code, Diagnostic, Severity
from shardplan.core.tree import ancestors

from .facts import Facts
from .field_places import field_label

NESTED = Code(
    code="SP380",
    title="activation checkpointing of a module and of a module around it",
    text="""Backward runs a checkpointed module again. A checkpointed module inside another one would run a third
time, and would save nothing beyond what the outer one saves.""",
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

COMPILED = Code(
    code="SP381",
    title="activation checkpointing inside a compiled module",
    text="""A compiled module is one graph, and torch.compile does not trace a checkpoint whose modules exchange
parameters while they run, as split modules do. Checkpoint the compiled module itself, or compile the parts that are
checkpointed.""",
    bad="""# shardplan validate llama-3.1-8b.json mine.yaml
version: "1"
name: mine
activation_checkpointing:
  modules: [model.layers.*.mlp]
compile:
  modules: [model.layers.*]
""",
    good="""# shardplan validate llama-3.1-8b.json mine.yaml
version: "1"
name: mine
activation_checkpointing:
  modules: [model.layers.*.mlp]
compile:
  modules: [model.layers.*.mlp, model.layers.*.self_attn]
""",
)

TOO_FEW = Code(
    code="SP382",
    title="`every` is larger than the number of modules",
    text="""`every: n` checkpoints each n-th of the modules that a pattern matches. If a pattern matches fewer than n
modules, none of them is checkpointed.""",
    bad="""# shardplan validate llama-3.1-8b.json mine.yaml
version: "1"
name: mine
activation_checkpointing:
  modules: [model.layers.*]
  every: 40
""",
    good="""# shardplan validate llama-3.1-8b.json mine.yaml
version: "1"
name: mine
activation_checkpointing:
  modules: [model.layers.*]
  every: 4
""",
)

CODES = (NESTED, COMPILED, TOO_FEW)


def check(facts: Facts) -> Iterator[Diagnostic]:
    """At most one finding for each reason."""
    section, wrapped = facts.resolved.activation_checkpointing, frozenset(facts.resolved.ac_modules)
    if section is None:
        return
    yield from _compiled(facts)
    if section.every > 1 and not wrapped and (section.modules or facts.resolved.dp_units):
        yield Diagnostic(
            code=TOO_FEW.code,
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
        code=NESTED.code,
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
            code=COMPILED.code,
            severity=Severity.ERROR,
            message=f"{facts.resolved.tree.named(inside)} is checkpointed inside {facts.resolved.tree.named(sorted(outer))}, which is compiled",
            primary=field_label(resolved.activation_checkpointing, "modules"),
            help="checkpoint the compiled modules, or compile the checkpointed ones",
            modules=inside,
        )
