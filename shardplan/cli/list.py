"""`shardplan list`: the model types and the built-in plan for each."""

from __future__ import annotations

import argparse

from shardplan.parse import builtin_plans, parse_plan

from .exits import CLEAN

HEADER = ("model", "plan", "sequence parallel", "description")


def run(args: argparse.Namespace) -> int:
    del args
    rows = [HEADER, *sorted(row for name in builtin_plans() for row in _rows(name))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return CLEAN


def _rows(name: str) -> list[tuple[str, ...]]:
    plan = parse_plan(name).plan
    assert plan is not None, name  # tests hold every built-in plan to having no findings
    overlay = "yes" if plan.has_overlay else "no"
    return [(model, name, overlay, " ".join(plan.description.split())) for model in plan.models]
