"""`shardplan verify`: the numeric proof of a plan."""

from __future__ import annotations

import argparse
import gc
import sys
from contextlib import redirect_stdout
from dataclasses import replace

from shardplan import api
from shardplan.core.diagnostics import PlanError
from shardplan.report import json_text, to_json, wants_color
from shardplan.report.proof_text import proof_text

from .argument_parts import model_of
from .exits import CLEAN, FINDINGS, UsageError
from .output import columns, finish, progress, warn
from .validate_command import report_of


def run(args: argparse.Namespace) -> int:
    if args.tp is None:
        if args.pp == 1:
            raise UsageError("give the size to prove: --tp, --pp or both")
        args.tp = 1
    if (args.schedule is not None or args.micro_batches is not None) and not (args.processes and args.pp > 1):
        raise UsageError("--schedule and --micro-batches are for --pp N --processes, which runs a pipeline's schedule")
    if args.dp_shard > 1 and not args.processes:
        raise UsageError("FSDP2 does not run in the simulation: --dp-shard above 1 needs --processes")
    if args.ep not in (1, args.tp) and not args.processes:
        raise UsageError("the simulation has the ranks of tp alone: --ep other than tp needs --processes")
    findings = report_of(args, layouts=False)  # the proof decides about those
    if not findings.ok:
        return finish(findings, args)
    warn(findings)
    gc.freeze()  # what was imported stays; what the proof leaves behind is collected
    gc.enable()
    try:
        with redirect_stdout(sys.stderr):
            report = api.verify(
                model_of(args),
                args.plan,
                tp=args.tp,
                dp_shard=args.dp_shard,
                ep=args.ep,
                pp=args.pp,
                sequence_parallel=args.sequence_parallel,
                processes=args.processes,
                schedule=args.schedule,
                micro_batches=args.micro_batches,
                allow_unproven=args.allow_unproven,
                derive=args.derive,
                progress=progress,
            )
    except PlanError as error:  # there is no reduced model, or it does not run
        return finish(replace(findings, diagnostics=error.diagnostics), args)
    except ValueError as error:  # the schedule does not fit the plan, the model or the mesh
        if args.schedule is None and args.micro_batches is None and args.pp == 1:
            raise
        raise UsageError(str(error)) from None
    finally:
        progress("")
    if args.json:
        print(json_text(to_json(report)))
    else:
        width = columns(sys.stdout)
        print(proof_text(report, color=wants_color(sys.stdout), all_rows=args.all, width=width))
    return CLEAN if report.ok else FINDINGS
