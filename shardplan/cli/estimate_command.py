"""`shardplan estimate`: the cost of a plan on a mesh."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout

from shardplan import api
from shardplan.core.diagnostics import PlanError
from shardplan.core.estimates import Estimate, TrainingStep
from shardplan.core.report import Report
from shardplan.report import json_text, to_json, wants_color

from .argument_parts import model_of
from .exits import CLEAN, UsageError
from .mesh_arguments import mesh_of
from .output import collect_garbage, columns, finish, progress, put, show

CHECKPOINTING = {"plan": None, "none": False, "full": {"mode": "full"}, "selective": {"mode": "selective"}}


def run(args: argparse.Namespace) -> int:
    if not mesh_of(args):
        raise UsageError("give a mesh: --tp 8, or --mesh dp_shard=8,tp=8")
    collect_garbage()
    try:
        with redirect_stdout(sys.stderr):  # what the model's own code prints
            made = _made(args)
    except PlanError as error:
        return finish(Report(plans=(args.plan,), model=args.model, diagnostics=error.diagnostics), args)
    except ValueError as error:
        raise UsageError(str(error)) from None
    finally:
        progress("")
    if args.json:
        put(json_text(to_json(made)))
        return CLEAN
    from shardplan.report.estimate_text import estimate_text

    show(estimate_text(made, color=wants_color(sys.stdout), width=columns(sys.stdout)))
    return CLEAN


def _made(args: argparse.Namespace) -> Estimate:
    step = TrainingStep(
        args.seq_len,
        args.micro_batch,
        args.precision,
        args.optimizer,
        args.expert_load,
        args.micro_batches,
        args.schedule,
    )
    options = {
        "device": args.device,
        "sequence_parallel": bool(args.sequence_parallel),
        "logits": args.logits,
        "activation_checkpointing": CHECKPOINTING[args.activation_checkpointing],
        "regather": args.regather or None,
        "derive": args.derive,
        "progress": progress,
    }
    return api.estimate(model_of(args), args.plan, mesh_of(args), step, **options)
