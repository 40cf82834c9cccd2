"""Edits of plans, judged by `validate` and by the numeric proof: `python -m tests.soundness --help`."""

from __future__ import annotations

import argparse
import os
import sys
from multiprocessing import get_context
from operator import methodcaller
from pathlib import Path

from tests.sampling import add_share, share_of

from .table import Row, table
from .tasks import PLANS, Task

HEAD = """# Validation against the numeric proof

Made by `{command}`; do not edit. Each edit of a plan is judged by `validate` and by the numeric proof (loss, logits and
every gradient of the sharded model). Refused is what `validate` does not let pass; missed are wrong plans that it does.
*Silently wrong* plans have the right loss and wrong gradients.

The plans: {plans}.

"""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soundness")
    parser.add_argument(
        "plans", nargs="*", help="llama=olmo edits that plan for that architecture, llama=olmo:tied tied"
    )
    parser.add_argument("--sample", type=int, help="edits of each plan, variant and size (all)")
    add_share(parser)
    parser.add_argument("--tp", type=int, nargs="*", default=[2])
    parser.add_argument("--kinds", nargs="*", default=[])
    parser.add_argument("--no-help", action="store_true", help="do not look for what fixes a finding")
    parser.add_argument("--table", type=Path, help="write the table to this file")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args(argv)
    tasks = [
        Task(word, tp, args.sample, args.seed, not args.no_help, args.kinds)
        for word, tp in share_of([(word, tp) for tp in args.tp for word in args.plans or PLANS], args)
    ]
    judged: list[Row] = []
    with get_context("spawn").Pool(args.jobs, maxtasksperchild=1) as pool:
        for task, found in zip(tasks, pool.imap(methodcaller("run"), tasks), strict=True):
            judged += found
            for row in found:
                if row.disagrees:
                    print(row.text, flush=True)
            print(f"{task.word} tp={task.tp}: {len(found)} edits, {len(judged)} in all", file=sys.stderr, flush=True)
    text = table(judged)
    print(text)
    if args.table is not None:
        command = f"python -m tests.soundness {' '.join(argv)}"
        args.table.write_text(HEAD.format(command=command, plans=", ".join(args.plans or PLANS)) + text + "\n", "utf-8")
    return int(any(row.disagrees for row in judged))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
