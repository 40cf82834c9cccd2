"""`python -m tests.soundness [--sample N] [--seed S] [--tp 2 4] [--no-help] [--table FILE] [plan or plan=architecture ...]`."""

from __future__ import annotations

import argparse
import os
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from shardplan.parse import builtin_plans, parse_plan  # noqa: E402

from .edits import Edit, edits, written_out  # noqa: E402
from .judge import Subject, judge, parse, subject  # noqa: E402
from .table import Row, row_of, table  # noqa: E402


def rows(plan: str, model: Subject, *, sample: int | None, seed: int, help: bool, kinds: list[str]) -> Iterator[Row]:
    """Judge the edits of a plan, or a sample of them."""
    document = written_out(parse_plan(plan).plan, model.tree)
    for sequence_parallel in (False, True):
        todo: list[Edit] = [
            edit for edit in edits(document, sequence_parallel=sequence_parallel) if not kinds or edit.kind in kinds
        ]
        if sample is not None and sample < len(todo):
            todo = random.Random(f"{seed} {plan} {model.name} {model.tp} {sequence_parallel}").sample(todo, sample)
        for edit in todo:
            edited = parse(edit.document)
            if edited is not None:
                verdict = judge(model, edited, sequence_parallel=sequence_parallel, help=help)
                yield row_of(plan, model, sequence_parallel, edit, verdict)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soundness")
    parser.add_argument("plans", nargs="*", help="built-in plans; llama=olmo2 edits that plan for that architecture")
    parser.add_argument("--sample", type=int, help="edits of each plan, variant and size (all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tp", type=int, nargs="*", default=[2])
    parser.add_argument("--kinds", nargs="*", default=[])
    parser.add_argument("--no-help", action="store_true", help="do not look for what mends a finding")
    parser.add_argument("--table", type=Path, help="write the table to this file")
    args = parser.parse_args(argv)
    judged: list[Row] = []
    for tp in args.tp:
        for word in args.plans or builtin_plans():
            plan, _, name = word.partition("=")
            model = subject(name or parse_plan(plan).plan.models[0], tp)
            for row in rows(plan, model, sample=args.sample, seed=args.seed, help=not args.no_help, kinds=args.kinds):
                judged.append(row)
                if row.disagrees:
                    print(row.text, flush=True)
            print(f"{word} tp={tp}: {len(judged)} edits", file=sys.stderr, flush=True)
    text = table(judged)
    print(text)
    if args.table is not None:
        args.table.write_text(text + "\n")
    return int(any(row.disagrees for row in judged))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
