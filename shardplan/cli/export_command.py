"""`shardplan export`: a plan in the words of another project, run in that project's own code."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shardplan import api
from shardplan.report import report_text, wants_color

from .argument_parts import model_of
from .exits import CLEAN, FINDINGS, UsageError
from .output import collect_garbage, finish, progress, put, say, show, write_file


def run(args: argparse.Namespace) -> int:
    if args.output is not None and Path(args.output).exists() and not args.force:
        raise UsageError(f"{args.output} exists; --force overwrites it")
    collect_garbage()
    try:
        made = api.export_plan(
            model_of(args), args.plan, args.to, tp=args.tp, run=args.run_it, derive=args.derive, progress=progress
        )
    except ValueError as error:  # processes cannot find the model
        raise UsageError(str(error)) from None
    finally:
        progress("")
    if made.text is None:
        return finish(made.report, args)
    if args.output is not None:
        write_file(args.output, made.text)
        say(f"{args.output}: written, {made.shown}")
        return finish(made.report, args)
    if args.json:
        return finish(made.report, args)
    put(made.text, end="")
    say(made.shown)
    if made.report.diagnostics:
        show(report_text(made.report, color=wants_color(sys.stderr)), stream=sys.stderr)
    return CLEAN if made.ok else FINDINGS
