"""`shardplan convert`: another project's plan as a plan file."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path

from shardplan.report import report_text, wants_color

from .argument_parts import model_of
from .exits import CLEAN, FINDINGS, UsageError
from .output import finish, progress, put, say, show, write_file

UNNAMED = "<converted>"


def run(args: argparse.Namespace) -> int:
    if (args.source is None) == (args.import_path is None):
        raise UsageError("give either SOURCE or --import")
    if args.model is None and (args.tp or args.settings or args.inputs or args.reduced or args.trust_remote_code):
        raise UsageError("--tp, --set, --inputs, --reduced and --trust-remote-code are for --model")
    if args.output is not None and Path(args.output).exists() and not args.force:
        raise UsageError(f"{args.output} exists; --force overwrites it")
    progress("converting")
    try:
        with redirect_stdout(sys.stderr):  # what imported code prints
            made = import_module("shardplan.convert").convert_plan(  # which could be installed by itself
                args.source,
                model=None if args.model is None else model_of(args),
                form=args.form,
                import_path=args.import_path,
                name=args.name,
                tp=args.tp,
                shown_as=args.output or UNNAMED,
            )
    finally:
        progress("")
    if made.text is None:
        return finish(made.report, args)
    if args.output is not None:
        write_file(args.output, made.text)
        say(f"{args.output}: {_verdict(args, made.ok)}")
        return finish(made.report, args)
    if args.json:
        return finish(made.report, args)
    put(made.text, end="")
    if made.report.diagnostics:
        show(report_text(made.report, color=wants_color(sys.stderr)), stream=sys.stderr)
    return CLEAN if made.ok else FINDINGS


def _verdict(args: argparse.Namespace, ok: bool) -> str:
    if args.model is None:
        return "written, not validated: no model was named"
    return "written and valid" if ok else "written, but not valid"
