"""`shardplan schema`: the JSON Schema of plans, or of reports."""

from __future__ import annotations

import argparse

from shardplan.report import json_text

from .exits import CLEAN


def run(args: argparse.Namespace) -> int:
    if args.report:
        from shardplan.report.report_schema import report_schema as schema
    else:
        from shardplan.language import json_schema as schema
    print(json_text(schema()))
    return CLEAN
