"""`shardplan fit`: the best configurations of a model on a number of devices."""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path

from shardplan import api
from shardplan.core.diagnostics import PlanError
from shardplan.core.fits import Fit, Fitted
from shardplan.core.report import Report
from shardplan.model.model_words import classify
from shardplan.report import json_text, to_json, wants_color

from .argument_parts import model_of
from .exits import CLEAN, UsageError
from .mesh_arguments import mesh_of
from .output import Bar, collect_garbage, finish, progress, put, say, show, write_file


def run(args: argparse.Namespace) -> int:
    from shardplan.report.estimate_text import mesh_text
    from shardplan.report.fit_script import launch_lines, script_of
    from shardplan.report.fit_text import fit_head, fit_tail, row_text

    if args.script is not None and not Path(args.script).parent.is_dir():
        raise UsageError(f"cannot write {args.script}: no folder {Path(args.script).parent}")  # before a minute of work
    color, out = wants_color(sys.stdout), sys.stdout
    is_type = classify(args.model).kind == "type"
    shown: list[Fitted] = []
    bar = Bar()

    def print_row(row: Fitted) -> None:
        progress("")
        if not shown and not args.json:
            show(fit_head(row, default=is_type), end="\n\n", stream=out)
        shown.append(row)
        if not args.json:
            show(row_text(len(shown), row, color=color), end="\n\n", stream=out)

    def at_work(text: str) -> None:
        if not gc.isenabled() and "torch" in sys.modules:
            collect_garbage()
        bar.progress(text)

    try:
        with redirect_stdout(sys.stderr):  # what the model's own code prints
            made = api.fit(
                model_of(args),
                args.plan,
                mesh_of(args),
                gpus=args.gpus,
                device=args.device,
                global_batch=args.global_batch,
                seq_len=args.seq_len,
                precision=args.precision,
                optimizer=args.optimizer,
                best=args.best,
                tokens=args.tokens,
                efficiency=args.efficiency,
                derive=args.derive,
                progress=at_work,
                advance=bar.advance,
                found_row=print_row,
            )
    except PlanError as error:
        return finish(Report(plans=(args.plan,), model=args.model, diagnostics=error.diagnostics), args)
    except ValueError as error:
        raise UsageError(str(error)) from None
    finally:
        progress("")
    plan = args.plan
    if made.derived is not None and args.script is not None:
        plan = str(Path(args.script).with_suffix(".plan.yaml"))
        write_file(plan, made.derived.text)
        say(f"{plan}: written, the plan that auto derived")
    if args.script is not None:
        settings = model_of(args).settings or {}
        write_file(args.script, script_of(made.rows[0], plan, is_type=is_type, settings=settings))
        say(f"{args.script}: written, for {mesh_text(made.rows[0].choice.sizes)}")
    if args.plot is not None:
        _plot(made, args.plot)
    if args.json:
        put(json_text(to_json(made)))
        return CLEAN
    numbers = [next(n for n, one in enumerate(shown, start=1) if one is row) for row in made.rows]
    show(fit_tail(made, numbers), end="\n\n")
    name = args.script or "train.py"
    show(f"launch {numbers[0]}." + ("" if args.script else " (--script train.py writes it)"))
    for launcher, line in launch_lines(made.rows[0], shlex.quote(name)):
        show(f"  {launcher}: {line}")
    return CLEAN


def _plot(made: Fit, file: str) -> None:
    from shardplan.report.plot import plot_fit

    try:
        plot_fit(made, file)
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'shardplan[plot]'") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {file}: {error}") from None
    say(f"{file}: written")
