"""`shardplan lock`: a bound plan as a file, and whether it is still bound like that."""

from __future__ import annotations

import argparse
import gc
import sys
from contextlib import redirect_stdout

from shardplan import api
from shardplan.api.locking import NamesCode
from shardplan.core.diagnostics import PlanError
from shardplan.core.plan_lock import LockCheck, LockedQuestion, PlanLock
from shardplan.core.report import Report
from shardplan.core.user_files import CannotRead, decode
from shardplan.report import json_text, to_json, wants_color
from shardplan.report.errors import sources_of
from shardplan.report.lock_json import check_text, lock_text, read_lock

from .exits import CLEAN, FINDINGS, UsageError
from .mesh_arguments import mesh_of
from .output import finish, progress, put, read_file, say, show, write_file

MOST_LOCK = 32 * 2**20  # bytes; the lock of a model of 126 layers, all of them folded, has some 20,000


def run(args: argparse.Namespace) -> int:
    if args.check is not None and (args.plan is not None or args.output is not None):
        raise UsageError("--check has the model and the plan from the lock: it takes neither PLAN nor --output")
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
        put(lock_text(made), end="")
    else:
        write_file(args.output, lock_text(made))
        say(f"{args.output}: written")
    return CLEAN


def _check(args: argparse.Namespace) -> int:
    lock = _read(args.check)
    with redirect_stdout(sys.stderr):
        check = _checked(lock, args)
    progress("")
    if args.json:
        put(json_text(to_json(check)))
    else:
        show(check_text(check, color=wants_color(sys.stdout)))
        if not check.ok:
            again = f"if that is meant: shardplan lock {lock.asked.model} {lock.asked.plan} ... -o {args.check}"
            say(again)
    return CLEAN if check.ok else FINDINGS


def _checked(lock: PlanLock, args: argparse.Namespace) -> LockCheck:
    """What the lock itself cannot allow is allowed by the command line, in the same words."""
    named = {"model": args.model, "inputs": args.inputs, "reduced": args.reduced}
    for what, word in named.items():
        if word not in (None, getattr(lock.asked, what)):
            raise UsageError(f"{args.check} is a lock of {what} {getattr(lock.asked, what)}, not of {word}")
    code = [word for word in named.values() if word is not None]
    try:
        return api.check_lock(lock, code=code, trust_remote_code=args.trust_remote_code, progress=progress)
    except NamesCode as error:
        words = error.word if error.what == "model" else f"--{error.what} {error.word}"
        raise UsageError(f"{error}; where you know the code: shardplan lock {words} --check {args.check}") from None


def _read(name: str) -> PlanLock:
    try:
        return read_lock(decode(read_file(name, MOST_LOCK)))
    except CannotRead as error:
        raise UsageError(f"{name} {error.reason}") from None
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from None
