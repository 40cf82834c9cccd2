"""`shardplan verify`: the numeric proof of a plan."""

from __future__ import annotations

import argparse
import gc
import sys
from contextlib import redirect_stdout
from dataclasses import replace

from shardplan import api
from shardplan.core.diagnostics import PlanError
from shardplan.core.mesh import MeshSizes
from shardplan.core.size_bounds import MOST_PROCESSES
from shardplan.report import json_text, to_json, wants_color
from shardplan.report.proof_text import proof_text

from .argument_parts import model_of
from .exits import CLEAN, FINDINGS, UsageError
from .mesh_arguments import mesh_of
from .output import columns, finish, progress, put, show, warn
from .validate_command import report_of


def run(args: argparse.Namespace) -> int:
    if args.tp is None and (args.pp or 1) == 1:
        raise UsageError("give the size to prove: --tp, --pp or both")
    args.tp = args.tp or 1
    sizes = MeshSizes(**mesh_of(args))
    if (args.schedule is not None or args.micro_batches is not None) and not (args.processes and sizes.pp > 1):
        raise UsageError("--schedule and --micro-batches are for --pp N --processes, which runs a pipeline's schedule")
    if max(sizes.dp_shard, sizes.dp_replicate, sizes.cp) > 1 and not args.processes:
        raise UsageError("FSDP2 does not run in the simulation: --dp-shard, --dp-replicate and --cp need --processes")
    if sizes.ep not in (1, args.tp) and not args.processes:
        raise UsageError("the simulation has the ranks of tp alone: --ep other than tp needs --processes")
    if args.processes and sizes.world_size > MOST_PROCESSES:
        raise UsageError(f"--processes starts at most {MOST_PROCESSES}, not {sizes.world_size}: use a smaller mesh")
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
                sizes,
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
        if args.schedule is None and args.micro_batches is None and sizes.pp == 1:
            raise
        raise UsageError(str(error)) from None
    finally:
        progress("")
    if args.json:
        put(json_text(to_json(report)))
    else:
        width = columns(sys.stdout)
        show(proof_text(report, color=wants_color(sys.stdout), all_rows=args.all, width=width))
    return CLEAN if report.ok else FINDINGS
