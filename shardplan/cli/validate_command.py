"""`shardplan validate`: checking a plan against a model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from difflib import unified_diff
from typing import Any

from shardplan import api
from shardplan.compiler.early import NoCheckpoint
from shardplan.core.report import Report
from shardplan.core.user_files import decode, in_form_of, with_unix_ends
from shardplan.language.limits import MAX_BYTES

from .argument_parts import model_of
from .exits import CLEAN, FINDINGS, UsageError
from .mesh_arguments import mesh_of
from .output import finish, progress, put, read_file, say, write_file


def run(args: argparse.Namespace) -> int:
    if (args.fix or args.diff) and args.quick:
        raise UsageError("changes are tried on the model itself: --fix and --diff do not go with --quick")
    try:
        if args.fix or args.diff:
            return _fix(args)
        return finish(report_of(args), args)
    except NoCheckpoint as error:
        raise UsageError(str(error)) from None


def _fix(args: argparse.Namespace) -> int:
    """Write the tried changes into the plan, or show them."""
    values = vars(args)
    options = {name: values[name] for name in OPTIONS if name in values}
    try:
        with redirect_stdout(sys.stderr):
            made = api.fix_plan(model_of(args), args.plan, mesh=mesh_of(args), progress=progress, **options)
    except ValueError as error:
        raise UsageError(str(error)) from None
    finally:
        progress("")
    changed = f"{made.changes} change{'' if made.changes == 1 else 's'}"
    if args.diff:
        lines = (made.before.splitlines(keepends=True), made.after.splitlines(keepends=True))
        put("".join(unified_diff(*lines, args.plan, args.plan)), end="")
        say(f"{changed} in what is shown; --fix writes it")
        return FINDINGS if made.changes or not made.report.ok else CLEAN
    if made.changes:
        content = read_file(args.plan, MAX_BYTES)
        if with_unix_ends(decode(content)) != made.before:
            raise UsageError(f"{args.plan} was changed while it was validated: nothing is written")
        write_file(args.plan, in_form_of(content, made.after))
    say(f"{args.plan}: {changed}")
    return finish(made.report, args)


def report_of(args: argparse.Namespace, function: Callable[..., Report] = api.validate, **own: Any) -> Report:
    """The findings of a function about MODEL and PLAN.

    What the model's own code prints goes to stderr, as stdout is for the report.

    Args:
        own: options of this function.
    """
    values = vars(args)
    options = {name: values[name] for name in OPTIONS if name in values}
    progress(f"reading {args.model}")
    try:
        with redirect_stdout(sys.stderr):
            return function(model_of(args), args.plan, mesh_of(args), progress=progress, **options, **own)
    finally:
        progress("")


OPTIONS = (
    "sequence_parallel",
    "seq_len",
    "strict",
    "quick",
    "proof",
    "allow_unproven",
    "derive",
)
