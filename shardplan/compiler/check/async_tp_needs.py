"""Asynchronous tensor parallelism has what it needs."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.diagnostics import Code, Diagnostic, Severity

from .check_words import field_label
from .facts import Facts

NEEDS = Code("SP383")


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for all that is missing."""
    section, resolved = facts.resolved.compile, facts.resolved
    if section is None or not section.async_tensor_parallel:
        return
    missing = {
        "tp above 1": (facts.tp or 1) > 1,
        "sequence parallelism": resolved.sequence_parallel,
        "the backend inductor": section.backend == "inductor",
        "modules to compile": bool(resolved.compile_modules),
    }
    lacking = [what for what, there in missing.items() if not there]
    if lacking:
        yield Diagnostic(
            code=NEEDS,
            severity=Severity.ERROR,
            message=f"async_tensor_parallel needs {' and '.join(lacking)}",
            primary=field_label(section, "async_tensor_parallel"),
            help="switch sequence parallelism on, or remove `async_tensor_parallel`"
            if lacking == ["sequence parallelism"]
            else "remove `async_tensor_parallel`, or give it what it needs",
        )
