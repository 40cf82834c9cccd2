"""`shardplan show`: what a plan does to each module of a model."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from dataclasses import replace

from shardplan import api
from shardplan.core.diagnostics import PlanError
from shardplan.report import json_text, to_json, wants_color

from .argument_parts import model_of
from .exits import CLEAN, UsageError
from .mesh_arguments import mesh_of
from .output import columns, finish, put, say, show, warn
from .validate_command import report_of


def run(args: argparse.Namespace) -> int:
    if args.html is not None:
        from .show_page import write_page

        return write_page(args)
    if args.seq_len is not None or args.device is not None or not args.proof:
        raise UsageError("--seq-len, --device and --no-proof are for --html FILE")
    args.sequence_parallel = bool(args.sequence_parallel)  # one variant is shown, so one is checked
    findings = report_of(args, layouts=False)  # compiling checks layouts
    if not findings.ok:
        return finish(findings, args)
    warn(findings)
    sizes = {"tp": findings.checked_tp or 1} | mesh_of(args)
    try:
        with redirect_stdout(sys.stderr):
            program = api.compile_plan(
                model_of(args),
                sizes,
                args.plan,
                sequence_parallel=args.sequence_parallel,
                allow_unproven=True,  # the plan is shown, not applied
                derive=args.derive,
            )
    except PlanError as error:
        return finish(replace(findings, diagnostics=error.diagnostics), args)
    if args.json:
        from shardplan.report.shown_program import shown_program

        put(json_text(to_json(shown_program(program, findings.sources, args.model))))
        return CLEAN
    from shardplan.report.program_text import WIDTH, program_text

    if args.tp is None:
        say(f"shown at tp {sizes['tp']}, the smallest size that splits the model; --tp selects another")
    width = columns(sys.stdout) or WIDTH
    show(program_text(program, findings.sources, color=wants_color(sys.stdout), all_rows=args.all, width=width))
    return CLEAN
