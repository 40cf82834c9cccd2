"""`shardplan diff --save` and `--against`: saving a bound plan to a file, and checking that it is still bound the same way."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout

from shardplan import api
from shardplan.api.locking import NamesCode
from shardplan.core.plan_lock import LockCheck, LockedQuestion, PlanLock
from shardplan.core.user_files import CannotRead, decode
from shardplan.report import json_text, to_json, wants_color
from shardplan.report.lock_json import check_text, lock_text, read_lock

from .exits import CLEAN, FINDINGS, UsageError
from .mesh_arguments import mesh_of
from .output import progress, put, read_file, say, show, write_file

MOST_LOCK = 32 * 2**20  # bytes; the lock of a model of 126 layers, all folded, has some 20,000


def save(args: argparse.Namespace) -> int:
    """Write the lock of a model and a plan, which take the positions of the two plans."""
    asked = LockedQuestion(
        args.old,
        args.new,
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
    write_file(args.save, lock_text(made))
    say(f"{args.save}: written")
    return CLEAN


def check(args: argparse.Namespace) -> int:
    """Compare a lock with how its plan is bound now."""
    lock = _read(args.against)
    with redirect_stdout(sys.stderr):
        found = _checked(lock, args)
    progress("")
    if args.json:
        put(json_text(to_json(found)))
    else:
        show(check_text(found, color=wants_color(sys.stdout)))
        if not found.ok:
            again = f"if that is meant: shardplan diff {lock.asked.model} {lock.asked.plan} ... --save {args.against}"
            say(again)
    return CLEAN if found.ok else FINDINGS


def _checked(lock: PlanLock, args: argparse.Namespace) -> LockCheck:
    """Check a lock with the permissions of the command line: the lock itself cannot allow code to run."""
    named = {"model": args.old, "inputs": args.inputs, "reduced": args.reduced}
    for what, word in named.items():
        if word not in (None, getattr(lock.asked, what)):
            raise UsageError(f"{args.against} is a lock of {what} {getattr(lock.asked, what)}, not of {word}")
    code = [word for word in named.values() if word is not None]
    try:
        return api.check_lock(lock, code=code, trust_remote_code=args.trust_remote_code, progress=progress)
    except NamesCode as error:
        words = error.word if error.what == "model" else f"--{error.what} {error.word}"
        raise UsageError(f"{error}; where you know the code: shardplan diff {words} --against {args.against}") from None


def _read(name: str) -> PlanLock:
    try:
        return read_lock(decode(read_file(name, MOST_LOCK)))
    except CannotRead as error:
        raise UsageError(f"{name} {error.reason}") from None
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from None
