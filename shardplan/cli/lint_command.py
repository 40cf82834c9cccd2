"""`shardplan lint`: plans alone. Imports neither a model nor torch."""

from __future__ import annotations

import argparse

from shardplan.core.report import Report, as_errors, ordered
from shardplan.core.sources import SourceMap
from shardplan.language import lint_plan

from .output import finish


def run(args: argparse.Namespace) -> int:
    parsed = [lint_plan(word) for word in dict.fromkeys(args.plans)]
    sources = SourceMap({name: file for one in parsed for name, file in one.sources.files.items()})
    findings = ordered((d for one in parsed for d in one.diagnostics), sources)
    report = Report(
        diagnostics=as_errors(findings) if args.strict else findings, sources=sources, plans=tuple(args.plans)
    )
    return finish(report, args)
