"""`shardplan convert`: another project's plan as a plan file."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from importlib import import_module

from .argument_parts import model_of
from .exits import UsageError
from .output import deliver, keep_existing, progress

UNNAMED = "<converted>"


def run(args: argparse.Namespace) -> int:
    if (args.source is None) == (args.import_path is None):
        raise UsageError("give either SOURCE or --import")
    if args.model is None and (args.tp or args.settings or args.inputs or args.reduced or args.trust_remote_code):
        raise UsageError("--tp, --set, --inputs, --reduced and --trust-remote-code are for --model")
    keep_existing(args)
    progress("converting")
    try:
        with redirect_stdout(sys.stderr):  # imported code may print
            made = import_module("shardplan.convert").convert_plan(  # it could be installed separately
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
    return deliver(made.text, made.report, args, _verdict(args, made.ok))


def _verdict(args: argparse.Namespace, ok: bool) -> str:
    if args.model is None:
        return "written, not validated: no model was named"
    return "written and valid" if ok else "written, but not valid"
