"""`python -m tests.soundness [--sample N] [--seed S] [--tp 2 4] [architecture ...]`."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import warnings

warnings.filterwarnings("ignore")
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

from shardplan.parse import builtin_plans, parse_plan  # noqa: E402

from .edits import edits, written_out  # noqa: E402
from .judge import judge, parse, subject  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tp", type=int, nargs="*", default=[2])
    parser.add_argument("--kinds", nargs="*")
    args = parser.parse_args()
    import collections
    table = collections.Counter()
    for tp in args.tp:
        for name in args.names or builtin_plans():
            plan = parse_plan(name).plan
            model = subject(plan.models[0], tp)
            document = written_out(plan, model.tree)
            for sp in (False, True):
                todo = [e for e in edits(document, sequence_parallel=sp) if not args.kinds or e.kind in args.kinds]
                if args.sample:
                    todo = random.Random(f"{args.seed}{name}{sp}{tp}").sample(todo, min(args.sample, len(todo)))
                for edit in todo:
                    edited = parse(edit.document)
                    if edited is None:
                        table[edit.kind, "form"] += 1
                        continue
                    start = time.time()
                    try:
                        v = judge(model, edited, sequence_parallel=sp)
                    except Exception as e:
                        import traceback; traceback.print_exc(limit=-4)
                        print("BROKEN", name, tp, sp, edit.what, type(e), str(e)[:300]); table[edit.kind,"BROKEN"]+=1; continue
                    how = ("wrong" if not v.right else "right") + (" silent" if v.silent else "")
                    got = "valid" if v.valid else "refused by structure" if v.structure else "refused"
                    table[edit.kind, how, got] += 1
                    if v.right != v.valid:
                        print("DISAGREE", name, "tp", tp, "sp", sp, edit.kind, edit.what, "|", how, v.worst, "|", got, [d.message for d in v.structure][:1], v.layout and [(f.kind, f.subject, str([str(o) for o in f.operands[:3]]), f.arrived, f.wanted, f.source and f.source.text,f.message[:100]) for f in v.layout.diagnostics[:2]], flush=True)
            print(name, tp, dict(collections.Counter((k[1:] for k in table.elements()))), flush=True)
    for k, n in sorted(table.items()): print(n, k)

main()
