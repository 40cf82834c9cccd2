"""`shardplan show --html`: a plan for a model on a mesh, as one HTML file."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout

from shardplan import api
from shardplan.core.diagnostics import PlanError
from shardplan.core.report import Report, count_text
from shardplan.report.errors import sources_of

from .argument_parts import model_of
from .exits import CLEAN, FINDINGS, UsageError
from .mesh_arguments import mesh_of
from .output import collect_garbage, finish, progress, say, write_file


def write_page(args: argparse.Namespace) -> int:
    if args.device is not None and args.seq_len is None:
        raise UsageError("--device is for an estimate: say --seq-len too")
    step = None
    collect_garbage()
    try:
        if args.seq_len is not None:
            from shardplan.core.estimates import TrainingStep

            step = TrainingStep(
                args.seq_len, args.micro_batch, micro_batches=args.micro_batches, schedule=args.schedule
            )
        with redirect_stdout(sys.stderr):  # what the model's own code prints
            made = api.plan_report(
                model_of(args),
                args.plan,
                mesh_of(args),
                step,
                sequence_parallel=args.sequence_parallel,
                device=args.device,
                proof=args.proof,
                derive=args.derive,
                progress=progress,
            )
    except PlanError as error:
        plans = (args.plan,)
        return finish(Report(error.diagnostics, sources=sources_of(error), plans=plans, model=args.model), args)
    except ValueError as error:
        raise UsageError(str(error)) from None
    finally:
        progress("")
    from shardplan.report.html_report import html_report

    shown = (made.plan, made.model, made.sizes, made.report, made.programs, made.estimates, made.flow, made.pipeline)
    write_file(args.html, html_report(*shown))
    say(f"{args.html}: written; {count_text(made.report.diagnostics)}")
    return CLEAN if made.report.ok else FINDINGS
