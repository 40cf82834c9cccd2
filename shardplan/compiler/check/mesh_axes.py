"""Mesh axes that are not supported yet are refused, never skipped."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.diagnostics import Code, Diagnostic, Severity
from shardplan.core.mesh import UNSUPPORTED

from .facts import Facts

AXIS = Code(
    code="SP550",
    title="a mesh axis that is not supported yet",
    text="""A mesh may have the axis `pp` (pipeline parallelism); with size 1 it is ignored. A larger size would distribute layers
over stages, which plans cannot declare yet.""",
)

CODES = (AXIS,)


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for each axis."""
    for axis, name in UNSUPPORTED.items():
        size = facts.resolved.sizes.of(axis)
        if size > 1:
            yield Diagnostic(
                code=AXIS.code,
                severity=Severity.ERROR,
                message=f"the mesh axis {axis} has size {size}, but {name} is not supported yet",
                help=f"use a mesh without the axis {axis}, or with size 1",
            )
