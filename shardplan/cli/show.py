"""`shardplan show`: what a plan does to each module of a model."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from dataclasses import replace

from shardplan import api
from shardplan.core.diagnostics import PlanError
from shardplan.core.mesh import MeshSizes
from shardplan.render import report_text, wants_color

from .exits import CLEAN, FINDINGS
from .output import warn
from .validate import report_of


def run(args: argparse.Namespace) -> int:
    args.sequence_parallel = bool(args.sequence_parallel)  # one variant is shown, so one is checked
    findings = report_of(args, layouts=False)  # compiling checks those
    color = wants_color(sys.stdout)
    if not findings.ok:
        print(report_text(findings, color=color))
        return FINDINGS
    warn(findings)
    from shardplan.render.program import program_text

    try:
        with redirect_stdout(sys.stderr):
            program = api.compile_plan(
                args.model,
                MeshSizes(tp=args.tp),
                args.plan,
                sequence_parallel=args.sequence_parallel,
                settings=dict(args.settings),
                trust_remote_code=args.trust_remote_code,
            )
    except PlanError as error:
        report = replace(findings, diagnostics=error.diagnostics)
        print(report_text(report, color=color))
        return FINDINGS
    print(program_text(program, findings.sources, color=color, all_rows=args.all))
    return CLEAN
