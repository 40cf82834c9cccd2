"""`shardplan list`: the built-in plans."""

from __future__ import annotations

import argparse

from shardplan.parse import builtin_plans, parse_plan

from .exits import CLEAN

HEADER = ("plan", "models", "sequence parallel", "extends", "description")


def run(args: argparse.Namespace) -> int:
    del args
    rows = [HEADER, *(_row(name) for name in sorted(builtin_plans()))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return CLEAN


def _row(name: str) -> tuple[str, ...]:
    plan = parse_plan(name).plan
    assert plan is not None, name  # tests hold every built-in plan to having no findings
    overlay = "yes" if plan.has_overlay else "no"
    parent = plan.parent.name if plan.parent else ""
    return (name, ", ".join(plan.models), overlay, parent, " ".join(plan.description.split()))
