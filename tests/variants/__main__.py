"""Try `auto` on published checkpoints and on the switches of model types: `python -m tests.variants [type ...]`."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from multiprocessing import get_context
from typing import get_args

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from tests.sampling import add_share, share_of  # noqa: E402

from .outcome import Outcome, Verdict  # noqa: E402
from .trials import planned, tried, unlisted  # noqa: E402


def table(found: Sequence[Outcome]) -> str:
    """How many configurations of each type have each verdict, and all types together."""
    verdicts = get_args(Verdict)
    rows = [("type", "configurations", "proven with SP too", *verdicts)]
    for name in (*dict.fromkeys(one.model_type for one in found), "all"):
        of = [one for one in found if name in (one.model_type, "all")]
        counts = Counter(one.verdict for one in of)
        rows.append(
            (name, *map(str, (len(of), sum(len(one.variants) > 1 for one in of), *(counts[v] for v in verdicts))))
        )
    return "\n".join(" | ".join(row) for row in rows)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.variants")
    parser.add_argument("types", nargs="*", help="model types (all that have a plan)")
    add_share(parser)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args(argv)
    found: list[Outcome] = []
    with get_context("spawn").Pool(args.jobs, maxtasksperchild=8) as pool:
        for outcomes in pool.imap(tried, args.types or share_of(planned(), args)):
            found += outcomes
            for one in outcomes:
                print(f"{one.verdict:16} {one.key} {one.about}", file=sys.stderr, flush=True)
    print(table(found))
    problems = unlisted(found)
    print("\n".join(problems))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
