"""`shardplan verify`: checking as `validate` does, at one size, with the whole proof."""

from __future__ import annotations

import argparse
import sys

from shardplan import api
from shardplan.report import wants_color

from .exits import UsageError
from .output import collect_garbage, columns, finish, show
from .validate_command import report_of


def run(args: argparse.Namespace) -> int:
    if args.tp is None and (args.pp or 1) == (args.cp or 1) == 1 and args.step is None:
        raise UsageError("give the size to prove: --tp, --pp or both, or --cp for a plan with rules for it")
    collect_garbage()
    try:
        report = report_of(
            args,
            api.verify,
            processes=args.processes,
            schedule=args.schedule,
            micro_batches=args.micro_batches,
            step=args.step,
        )
    except ValueError as error:  # the mesh or the schedule cannot be run here
        raise UsageError(str(error)) from None
    if report.proof is not None and not args.json:
        from shardplan.report.proof_text import proof_text

        width = columns(sys.stdout)
        show(proof_text(report.proof, color=wants_color(sys.stdout), all_rows=args.all, width=width), end="\n\n")
    return finish(report, args)
