"""`shardplan lock`: a bound plan as a file, and whether it is still bound like that."""

from __future__ import annotations

import argparse
import gc
import sys
from contextlib import redirect_stdout
from pathlib import Path

from shardplan import api
from shardplan.core.diagnostics import PlanError
from shardplan.core.plan_lock import LockedQuestion, PlanLock
from shardplan.core.report import Report
from shardplan.report import json_text, wants_color
from shardplan.report.errors import sources_of
from shardplan.report.lock_json import check_json, check_text, lock_text, read_lock

from .exits import CLEAN, FINDINGS, UsageError
from .mesh_arguments import mesh_of
from .output import finish, progress, write_file


def run(args: argparse.Namespace) -> int:
    if args.check is not None and (args.model is not None or args.output is not None):
        raise UsageError("--check has the model and the plan from the lock: it takes neither MODEL nor --output")
    if args.check is None and args.plan is None:
        raise UsageError("give MODEL and PLAN, or --check LOCK")
    gc.freeze()  # what was imported stays; what the comparison leaves behind is collected
    gc.enable()
    try:
        return _check(args) if args.check is not None else _write(args)
    except PlanError as error:
        plans = (args.plan,) if args.plan else ()
        return finish(Report(error.diagnostics, sources=sources_of(error), plans=plans, model=args.model), args)
    except ValueError as error:
        raise UsageError(str(error)) from None
    finally:
        progress("")


def _write(args: argparse.Namespace) -> int:
    asked = LockedQuestion(
        args.model,
        args.plan,
        mesh_of(args),
        args.sequence_parallel,
        dict(args.settings),
        args.inputs,
        args.reduced,
        args.trust_remote_code,
        args.derive,
    )
    with redirect_stdout(sys.stderr):  # what the model's own code prints
        made = api.lock_plan(asked, progress=progress)
    if args.output is None:
        print(lock_text(made), end="")
    else:
        write_file(args.output, lock_text(made))
        print(f"{args.output}: written", file=sys.stderr)
    return CLEAN


def _check(args: argparse.Namespace) -> int:
    lock = _read(args.check)
    with redirect_stdout(sys.stderr):
        check = api.check_lock(lock, progress=progress)
    progress("")
    if args.json:
        print(json_text(check_json(check)))
    else:
        print(check_text(check, color=wants_color(sys.stdout)))
        if not check.ok:
            again = f"if that is meant: shardplan lock {lock.asked.model} {lock.asked.plan} ... -o {args.check}"
            print(again, file=sys.stderr)
    return CLEAN if check.ok else FINDINGS


def _read(name: str) -> PlanLock:
    try:
        return read_lock(Path(name).read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror or error}") from None
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from None
