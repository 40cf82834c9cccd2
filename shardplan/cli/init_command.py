"""`shardplan init`: deriving a plan for a model."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from pathlib import Path

from shardplan import api
from shardplan.core.diagnostics import PlanError
from shardplan.core.report import Report
from shardplan.report import text, wants_color
from shardplan.report.errors import sources_of

from .argument_parts import model_of
from .editor_settings import schema_line
from .exits import CLEAN, FINDINGS
from .output import collect_garbage, finish, keep_existing, progress, put, say, show, write_file


def run(args: argparse.Namespace) -> int:
    keep_existing(args)
    collect_garbage()
    tp = args.tp or 2
    try:
        with redirect_stdout(sys.stderr):
            made = api.init_plan(
                model_of(args),
                tp=tp,
                sequence_parallel=args.sequence_parallel,
                expert_parallel=args.expert_parallel,
                context_parallel=args.context_parallel,
                name=args.name,
                progress=progress,
            )
    except PlanError as error:
        report = Report(plans=("init",), model=args.model, diagnostics=error.diagnostics, sources=sources_of(error))
        return finish(report, args)
    finally:
        progress("")
    if made.diagnostics:
        show(text(made.diagnostics, made.sources, color=wants_color(sys.stderr)) + "\n", stream=sys.stderr)
    if args.output is None:
        put(made.text, end="")
    else:
        line = schema_line(Path(args.output))
        write_file(args.output, line + made.text)
        if not line:
            say("`shardplan editor schema --install` gives editors the plan's schema")
        say(f"{args.output}: proven at tp={tp}")
    return FINDINGS if any(one.is_error for one in made.diagnostics) else CLEAN
