"""`shardplan validate`: a plan against a model."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout

from shardplan import api
from shardplan.compiler.early import NoCheckpoint
from shardplan.core.report import Report

from .argument_parts import model_of
from .exits import UsageError
from .output import finish, progress


def run(args: argparse.Namespace) -> int:
    try:
        return finish(report_of(args), args)
    except NoCheckpoint as error:
        raise UsageError(str(error)) from None


def report_of(args: argparse.Namespace, *, layouts: bool = True) -> Report:
    """The findings about MODEL and PLAN, those about layouts only where wanted.

    What the model's own code prints goes to stderr: stdout is the report's.
    """
    values = vars(args)
    options = {name: values[name] for name in OPTIONS if name in values}
    progress(f"reading {args.model}")
    try:
        with redirect_stdout(sys.stderr):
            return api.validate(model_of(args), args.plan, layouts=layouts, progress=progress, **options)
    finally:
        progress("")


OPTIONS = (
    "tp",
    "dp_shard",
    "dp_replicate",
    "cp",
    "ep",
    "pp",
    "sequence_parallel",
    "seq_len",
    "strict",
    "quick",
    "proof",
    "allow_unproven",
    "derive",
)
