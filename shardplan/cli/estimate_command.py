"""`shardplan estimate`: what a plan costs on a mesh, or on every mesh for a number of devices."""

from __future__ import annotations

import argparse
import gc
import sys
from contextlib import redirect_stdout

from shardplan import api
from shardplan.core.diagnostics import PlanError
from shardplan.core.estimates import Estimate, Sweep, TrainingStep
from shardplan.core.report import Report
from shardplan.report import json_text, to_json, wants_color

from .argument_parts import model_of
from .exits import CLEAN, UsageError
from .mesh_arguments import mesh_of
from .output import columns, finish, progress, put, say, show

TRIED = ("ep", "pp", "cp")  # the axes of a sweep
CHECKPOINTING = {"plan": None, "none": False, "full": {"mode": "full"}, "selective": {"mode": "selective"}}


def run(args: argparse.Namespace) -> int:
    sizes = mesh_of(args)
    if not sizes and args.sweep is None:
        raise UsageError("give a mesh (--tp 8, or --mesh dp_shard=8,tp=8) or --sweep N")
    if args.sweep is not None and not sizes.keys() <= set(TRIED):
        raise UsageError(f"--sweep tries every size of tp, dp_shard and dp_replicate: it takes {', '.join(TRIED)}")
    if args.sweep is None and any(isinstance(one, tuple) for one in sizes.values()):
        raise UsageError("several sizes of an axis are for --sweep N")
    if args.sweep is not None and args.device is None:
        raise UsageError("--sweep compares with a device's memory and speed: name one with --device")
    if args.plot is not None and args.sweep is None:
        raise UsageError("--plot is for --sweep")
    gc.freeze()  # what was imported stays; what the traces leave behind is collected
    gc.enable()
    try:
        with redirect_stdout(sys.stderr):  # what the model's own code prints
            made = _made(args)
    except PlanError as error:
        return finish(Report(plans=(args.plan,), model=args.model, diagnostics=error.diagnostics), args)
    except ValueError as error:
        raise UsageError(str(error)) from None
    finally:
        progress("")
    if args.plot is not None and isinstance(made, Sweep):
        _plot(made, args.plot)
    if args.json:
        put(json_text(to_json(made)))
        return CLEAN
    from shardplan.report.estimate_text import estimate_text, sweep_text

    color, width = wants_color(sys.stdout), columns(sys.stdout)
    if isinstance(made, Sweep):
        show(sweep_text(made, color=color, width=width))
    else:
        show(estimate_text(made, color=color, width=width))
    return CLEAN


def _made(args: argparse.Namespace) -> Estimate | Sweep:
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
    sizes = mesh_of(args)
    if args.sweep is not None:
        ep, pp, cp = (one if isinstance(one := sizes.get(axis, 1), tuple) else (one,) for axis in TRIED)
        return api.sweep(model_of(args), args.plan, args.sweep, step, ep=ep, pp=pp, cp=cp, **options)
    return api.estimate(model_of(args), args.plan, sizes, step, **options)


def _plot(made: Sweep, file: str) -> None:
    from shardplan.report.plot import plot_sweep

    try:
        plot_sweep(made, file)
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'shardplan[plot]'") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {file}: {error}") from None
    say(f"{file}: written")
