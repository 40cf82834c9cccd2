"""`shardplan export`: a plan in the words of another project, run in that project's own code."""

from __future__ import annotations

import argparse

from shardplan import api

from .argument_parts import model_of
from .exits import UsageError
from .output import collect_garbage, deliver, keep_existing, progress


def run(args: argparse.Namespace) -> int:
    keep_existing(args)
    collect_garbage()
    try:
        made = api.export_plan(
            model_of(args), args.plan, args.to, tp=args.tp, run=args.run_it, derive=args.derive, progress=progress
        )
    except ValueError as error:  # other processes cannot find the model
        raise UsageError(str(error)) from None
    finally:
        progress("")
    return deliver(made.text, made.report, args, f"written, {made.shown}", note=made.shown)
