"""`shardplan list`: the model types and the built-in plan for each; for one model, what its plan splits."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout

from shardplan import api
from shardplan.compiler.user_inputs import Model
from shardplan.core.coverage import Coverage, ListedPlan, Listing
from shardplan.core.diagnostics import PlanError
from shardplan.core.report import Report
from shardplan.language import builtin_plans, parse_plan
from shardplan.report import json_text, to_json
from shardplan.report.table import table

from .exits import CLEAN, UsageError
from .output import columns, finish, put, show

BY_NAME = "(by name)"  # a plan that `auto` does not choose
HEADER = ("model", "plan", "sequence parallel", "description")


def run(args: argparse.Namespace) -> int:
    if args.model is None:
        if args.settings or args.trust_remote_code:
            raise UsageError("--set and --trust-remote-code are for a MODEL")
        return _collection(args)
    try:
        with redirect_stdout(sys.stderr):  # transformers prints while it builds the model
            named = Model(args.model, dict(args.settings), trust_remote_code=args.trust_remote_code)
            found = api.coverage(named, derive=False)
    except PlanError as error:
        return finish(Report(model=args.model, plans=("auto",), diagnostics=error.diagnostics), args)
    if args.json:
        put(json_text(to_json(found)))
    else:
        _print(_about(found))
    return CLEAN


def _collection(args: argparse.Namespace) -> int:
    listed = sorted((row for name in builtin_plans() for row in _rows(name)), key=lambda row: (row.model, row.plan))
    if args.json:
        put(json_text(to_json(Listing(tuple(listed)))))
    else:
        _print([HEADER, *((x.model, x.plan, "yes" if x.sequence_parallel else "no", x.description) for x in listed)])
    return CLEAN


def _rows(name: str) -> list[ListedPlan]:
    plan = parse_plan(name).plan
    assert plan is not None, name  # tests check that no built-in plan has findings
    description = " ".join(plan.description.split())
    return [ListedPlan(model, name, plan.has_overlay, description) for model in plan.models or (BY_NAME,)]


def _about(found: Coverage) -> Iterator[tuple[str, str]]:
    yield "model", found.model
    yield "plan", found.plan
    for variant, sizes in found.allowed_tp.items():
        yield f"tp sizes, {variant.replace('_', ' ')}", ", ".join(map(str, sizes))
    if "sequence_parallel" not in found.allowed_tp:
        yield "tp sizes, sequence parallel", "none: the plan has no sequence_parallel section"
    yield "split inside the layers", f"{found.split:.1%} of the parameters"
    for part, share in found.whole.items():
        yield "whole on every rank", f"{part}, {f'{share:.1%}' if share >= 0.001 else 'under 0.1%'}"


def _print(rows: Iterable[tuple[str, ...]]) -> None:
    """Print a line for each row, or more where the terminal is narrower."""
    show("\n".join(table(rows, width=columns(sys.stdout))))
