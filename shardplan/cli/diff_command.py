"""`shardplan diff`: the differences between two plans, or between a plan and its lock."""

from __future__ import annotations

import argparse
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
from .output import collect_garbage, columns, finish, progress, put, show


def run(args: argparse.Namespace) -> int:
    collect_garbage()
    try:
        return _with_lock(args) if args.save is not None or args.against is not None else _compare(args)
    except PlanError as error:
        plans = tuple(plan for plan in (args.old, args.new) if plan is not None)
        return finish(Report(error.diagnostics, sources=sources_of(error), plans=plans, model=args.model), args)
    except ValueError as error:
        raise UsageError(str(error)) from None
    finally:
        progress("")


def _with_lock(args: argparse.Namespace) -> int:
    from .locks import check, save

    if args.save is not None and args.against is not None:
        raise UsageError("--save writes a lock and --against compares with one: give one of them")
    if args.seq_len is not None or args.device is not None or args.markdown:
        raise UsageError("--seq-len, --device and --markdown are for two plans")
    if args.save is not None and (args.new is None or args.model is not None):
        raise UsageError("write diff MODEL PLAN --save LOCK")
    if args.against is not None and args.new is not None:
        raise UsageError("--against has the model and the plan from the lock: write diff --against LOCK")
    return save(args) if args.save is not None else check(args)


def _compare(args: argparse.Namespace) -> int:
    if args.new is None:
        raise UsageError("give OLD and NEW, MODEL PLAN --save LOCK, or --against LOCK")
    with redirect_stdout(sys.stderr):  # what the model's own code prints
        made = _made(args)
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
