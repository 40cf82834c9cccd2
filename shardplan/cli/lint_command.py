"""`shardplan lint`: checking plans without a model. It does not import torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

from shardplan.core.report import Report, as_errors, ordered
from shardplan.core.sources import SourceMap
from shardplan.language import lint_plan
from shardplan.language.plan_files import ENDINGS

from .exits import UsageError
from .output import finish


def run(args: argparse.Namespace) -> int:
    plans = tuple(dict.fromkeys(plan for word in args.plans for plan in plans_of(word)))
    parsed = [lint_plan(plan) for plan in plans]
    sources = SourceMap({name: file for one in parsed for name, file in one.sources.files.items()})
    findings = ordered((d for one in parsed for d in one.diagnostics), sources)
    report = Report(diagnostics=as_errors(findings) if args.strict else findings, sources=sources, plans=plans)
    return finish(report, args)


def plans_of(word: str) -> Iterator[str]:
    """The files that a word names: the file or, for a folder, all plan files below it, except hidden ones.

    Raises:
        UsageError: a folder without plan files.
    """
    if not os.path.isdir(word):
        yield word
        return
    empty = True
    for folder, inside, files in os.walk(word):
        inside[:] = sorted(name for name in inside if not name.startswith("."))
        for name in sorted(files):
            if name.lower().endswith(ENDINGS) and not name.startswith("."):
                empty = False
                yield os.path.join(folder, name)
    if empty:
        raise UsageError(f"{word} has no file that ends with {', '.join(ENDINGS)}")
