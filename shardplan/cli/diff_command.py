"""`shardplan diff`: what two plans do differently."""

from __future__ import annotations

import argparse
import gc
import sys
from contextlib import redirect_stdout

from shardplan import api
from shardplan.core.diagnostics import PlanError
from shardplan.core.plan_changes import PlanDiff
from shardplan.core.report import Report
from shardplan.report import json_text, to_json, wants_color
from shardplan.report.errors import sources_of

from .argument_parts import model_of
from .exits import CLEAN, FINDINGS, UsageError
from .mesh_arguments import mesh_of
from .output import columns, finish, progress, put, show


def run(args: argparse.Namespace) -> int:
    gc.freeze()  # what was imported stays; what the comparison leaves behind is collected
    gc.enable()
    try:
        with redirect_stdout(sys.stderr):  # what the model's own code prints
            made = _made(args)
    except PlanError as error:
        plans = (args.old, args.new)
        return finish(Report(error.diagnostics, sources=sources_of(error), plans=plans, model=args.model), args)
    except ValueError as error:
        raise UsageError(str(error)) from None
    finally:
        progress("")
    if args.json:
        put(json_text(to_json(made)))
        return FINDINGS if made.differs else CLEAN
    from shardplan.report.diff_text import diff_markdown, diff_text

    if args.markdown:
        show(diff_markdown(made))
    else:
        show(diff_text(made, color=wants_color(sys.stdout), width=columns(sys.stdout)))
    return FINDINGS if made.differs else CLEAN


def _made(args: argparse.Namespace) -> PlanDiff:
    if args.model is None:
        if {args.old, args.new} & {"auto", "hf"}:
            raise UsageError("the plans auto and hf depend on a model: name one")
        of_model = (
            mesh_of(args) or None,
            args.seq_len,
            args.device,
            args.sequence_parallel,
            args.settings,
            args.inputs,
            args.reduced,
        )
        if any(one not in (None, []) for one in of_model) or args.trust_remote_code:
            raise UsageError("a mesh, --seq-len and the options of a model are for a MODEL")
        return api.diff_plans(args.old, args.new)
    if args.device is not None and args.seq_len is None:
        raise UsageError("--device is for an estimate: say --seq-len too")
    step = None
    if args.seq_len is not None:
        from shardplan.core.estimates import TrainingStep

        step = TrainingStep(args.seq_len, args.micro_batch)
    return api.diff_plans(
        args.old,
        args.new,
        model_of(args),
        mesh_of(args),
        step,
        sequence_parallel=args.sequence_parallel,
        device=args.device,
        derive=args.derive,
        progress=progress,
    )
